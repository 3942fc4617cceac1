//! A file system of one file, whose server stops answering when it is told to: what a parallel file
//! system looks like whose server is gone. It speaks the kernel's protocol (`linux/fuse.h`, 7.31)
//! over a descriptor that mount(8) is given as its standard input.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

/// The one file.
pub const NAME: &str = "corpus.bin";

/// Its bytes tell their place.
pub fn byte_at(offset: u64) -> u8 {
    (offset * 31 / 7) as u8
}

const FILE_LEN: u64 = 4 << 20;

/// A mount, gone when it is dropped.
pub struct Frozen {
    pub folder: PathBuf,
    state: Arc<State>,
    _root: tempfile::TempDir,
}

#[derive(Default)]
struct State {
    /// Reads from here on are not answered, if there is such a place.
    sick_from: Mutex<Option<u64>>,
    ears: Mutex<Ears>,
    changed: Condvar,
}

/// Whether the server listens.
#[derive(Default, PartialEq)]
enum Ears {
    #[default]
    Open,
    /// They are to be closed, and the server may still be in the middle of listening.
    Closing,
    Closed,
}

impl Frozen {
    /// Mounts it, or says why that cannot be done here.
    pub fn mount() -> Result<Self, String> {
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let device = device.map_err(|e| format!("/dev/fuse: {e}"))?;
        let root = tempfile::tempdir().map_err(|e| e.to_string())?;
        let ours = device.try_clone().map_err(|e| e.to_string())?;
        let output = Command::new("mount")
            .args(["-i", "-t", "fuse.frozen", "frozen"])
            .arg(root.path())
            .args(["-o", "fd=0,rootmode=40000,user_id=0,group_id=0"])
            .stdin(Stdio::from(device))
            .output()
            .map_err(|e| format!("mount: {e}"))?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
        }
        let state = Arc::new(State::default());
        let served = Arc::clone(&state);
        thread::spawn(move || serve(ours, &served));
        // The first close teaches the kernel that there is no `flush`.
        drop(File::open(root.path().join(NAME)));
        Ok(Frozen { folder: root.path().to_owned(), state, _root: root })
    }

    /// Reads from this byte on are not answered any more.
    pub fn sicken(&self, from: u64) {
        *self.state.sick_from.lock().unwrap() = Some(from);
    }

    /// Nothing is listened to any more.
    pub fn deafen(&self) {
        *self.state.ears.lock().unwrap() = Ears::Closing;
        // A server in the middle of listening takes one more request; one that was about to listen
        // takes none, and the caller waits.
        let absent = self.folder.join("not there");
        thread::spawn(move || drop(std::fs::metadata(absent)));
        let ears = self.state.ears.lock().unwrap();
        drop(self.state.changed.wait_while(ears, |ears| *ears == Ears::Closing).unwrap());
    }

    /// All is answered again, also what was not.
    pub fn heal(&self) {
        *self.state.sick_from.lock().unwrap() = None;
        *self.state.ears.lock().unwrap() = Ears::Open;
        self.state.changed.notify_all();
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.heal();
        let _ = Command::new("umount").arg("-l").arg(Path::new(&self.folder)).status();
    }
}

/// Operations, by their numbers.
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

fn serve(mut device: File, state: &State) {
    let mut request = vec![0; 1 << 20];
    let mut unanswered: Vec<(u64, u64, usize)> = Vec::new();
    loop {
        let mut ears = state.ears.lock().unwrap();
        while *ears != Ears::Open {
            *ears = Ears::Closed;
            state.changed.notify_all();
            ears = state.changed.wait(ears).unwrap();
        }
        drop(ears);
        if state.sick_from.lock().unwrap().is_none() {
            for (unique, offset, len) in unanswered.drain(..) {
                answer(&mut device, unique, &file_bytes(offset, len));
            }
        }
        // The mount is gone.
        let Ok(len) = device.read(&mut request) else { return };
        let (operation, unique) = (u32_at(&request, 4), u64_at(&request, 8));
        let (node, body) = (u64_at(&request, 16), &request[40..len]);
        match operation {
            INIT => answer(&mut device, unique, &init()),
            LOOKUP if body.strip_suffix(b"\0") == Some(NAME.as_bytes()) => {
                let mut entry = 2_u64.to_le_bytes().to_vec();
                entry.extend([0; 32]);
                entry.extend(attributes(2));
                answer(&mut device, unique, &entry);
            }
            LOOKUP => refuse(&mut device, unique, 2),
            GETATTR => {
                let mut told = vec![0; 16];
                told.extend(attributes(node));
                answer(&mut device, unique, &told);
            }
            OPEN => answer(&mut device, unique, &[0; 16]),
            READ => {
                let (offset, len) = (u64_at(body, 8), u32_at(body, 16) as usize);
                match *state.sick_from.lock().unwrap() {
                    Some(from) if offset + len as u64 > from => {
                        unanswered.push((unique, offset, len));
                    }
                    _ => answer(&mut device, unique, &file_bytes(offset, len)),
                }
            }
            STATFS => answer(&mut device, unique, &[0; 80]),
            RELEASE => answer(&mut device, unique, &[]),
            FORGET | BATCH_FORGET | INTERRUPT => {}
            // Among them `flush`, which the kernel would else wait for at the end of a process that
            // has a file open here, whatever signals come.
            _ => refuse(&mut device, unique, 38),
        }
    }
}

fn init() -> Vec<u8> {
    let words: [u32; 8] = [7, 31, 0, 0, 0x0040_0040, 1 << 17, 1, 32];
    let mut told: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    told.resize(64, 0);
    told
}

fn attributes(node: u64) -> Vec<u8> {
    let (size, mode) = if node == 2 { (FILE_LEN, 0o100_444) } else { (0, 0o40_555) };
    let mut told: Vec<u8> = [node, size, size / 512, 0, 0, 0].map(u64::to_le_bytes).concat();
    told.extend([0_u32, 0, 0, mode, 1, 0, 0, 0, 4096, 0].map(u32::to_le_bytes).concat());
    told
}

fn file_bytes(offset: u64, len: usize) -> Vec<u8> {
    (offset..(offset + len as u64).min(FILE_LEN)).map(byte_at).collect()
}

fn answer(device: &mut File, unique: u64, body: &[u8]) {
    let mut told = (16 + body.len() as u32).to_le_bytes().to_vec();
    told.extend(0_u32.to_le_bytes());
    told.extend(unique.to_le_bytes());
    told.extend(body);
    // The asker may be gone.
    let _ = device.write_all(&told);
}

fn refuse(device: &mut File, unique: u64, errno: i32) {
    let mut told = 16_u32.to_le_bytes().to_vec();
    told.extend((-errno).to_le_bytes());
    told.extend(unique.to_le_bytes());
    let _ = device.write_all(&told);
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}
