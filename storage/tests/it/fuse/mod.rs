//! A file system of one file, whose server stops responding on request, like a parallel file system
//! whose server has failed. It implements the kernel's protocol (`linux/fuse.h`, 7.31) over a
//! descriptor that mount(8) receives as its standard input.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

/// The one file.
pub const NAME: &str = "corpus.bin";

/// Each byte depends on its offset.
pub fn byte_at(offset: u64) -> u8 {
    (offset * 31 / 7) as u8
}

const FILE_LEN: u64 = 4 << 20;

/// A mount, unmounted when dropped.
pub struct Frozen {
    pub folder: PathBuf,
    state: Arc<State>,
    _root: tempfile::TempDir,
}

#[derive(Default)]
struct State {
    /// Reads that reach beyond this byte are not answered, if set.
    stalled_from: Mutex<Option<u64>>,
    listening: Mutex<Ears>,
    changed: Condvar,
}

/// Whether the server takes requests.
#[derive(Default, PartialEq)]
enum Ears {
    #[default]
    Open,
    /// The server is to stop, and may still be reading a request.
    Closing,
    Closed,
}

impl Frozen {
    /// Mounts it, or returns why that is not possible here.
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
        // On the first close the kernel learns that `flush` is not supported.
        drop(File::open(root.path().join(NAME)));
        Ok(Frozen { folder: root.path().to_owned(), state, _root: root })
    }

    /// Stops answering reads that reach beyond this byte.
    pub fn stall_from(&self, from: u64) {
        *self.state.stalled_from.lock().unwrap() = Some(from);
    }

    /// Stops taking requests.
    pub fn deafen(&self) {
        *self.state.listening.lock().unwrap() = Ears::Closing;
        // A server that is reading a request takes one more; otherwise it takes none, and this
        // caller waits.
        let absent = self.folder.join("not there");
        thread::spawn(move || drop(std::fs::metadata(absent)));
        let listening = self.state.listening.lock().unwrap();
        drop(
            self.state
                .changed
                .wait_while(listening, |listening| *listening == Ears::Closing)
                .unwrap(),
        );
    }

    /// Answers all requests again, also the stalled ones.
    pub fn heal(&self) {
        *self.state.stalled_from.lock().unwrap() = None;
        *self.state.listening.lock().unwrap() = Ears::Open;
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
        let mut listening = state.listening.lock().unwrap();
        while *listening != Ears::Open {
            *listening = Ears::Closed;
            state.changed.notify_all();
            listening = state.changed.wait(listening).unwrap();
        }
        drop(listening);
        if state.stalled_from.lock().unwrap().is_none() {
            for (unique, offset, len) in unanswered.drain(..) {
                answer(&mut device, unique, &file_bytes(offset, len));
            }
        }
        // An error means that it was unmounted.
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
                let mut reply = vec![0; 16];
                reply.extend(attributes(node));
                answer(&mut device, unique, &reply);
            }
            OPEN => answer(&mut device, unique, &[0; 16]),
            READ => {
                let (offset, len) = (u64_at(body, 8), u32_at(body, 16) as usize);
                match *state.stalled_from.lock().unwrap() {
                    Some(from) if offset + len as u64 > from => {
                        unanswered.push((unique, offset, len));
                    }
                    _ => answer(&mut device, unique, &file_bytes(offset, len)),
                }
            }
            STATFS => answer(&mut device, unique, &[0; 80]),
            RELEASE => answer(&mut device, unique, &[]),
            FORGET | BATCH_FORGET | INTERRUPT => {}
            // Among them `flush`, for which the kernel would otherwise wait at the exit of a
            // process with an open file, whatever signals it receives.
            _ => refuse(&mut device, unique, 38),
        }
    }
}

fn init() -> Vec<u8> {
    let words: [u32; 8] = [7, 31, 0, 0, 0x0040_0040, 1 << 17, 1, 32];
    let mut reply: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    reply.resize(64, 0);
    reply
}

fn attributes(node: u64) -> Vec<u8> {
    let (size, mode) = if node == 2 { (FILE_LEN, 0o100_444) } else { (0, 0o40_555) };
    let mut reply: Vec<u8> = [node, size, size / 512, 0, 0, 0].map(u64::to_le_bytes).concat();
    reply.extend([0_u32, 0, 0, mode, 1, 0, 0, 0, 4096, 0].map(u32::to_le_bytes).concat());
    reply
}

fn file_bytes(offset: u64, len: usize) -> Vec<u8> {
    (offset..(offset + len as u64).min(FILE_LEN)).map(byte_at).collect()
}

fn answer(device: &mut File, unique: u64, body: &[u8]) {
    let mut reply = (16 + body.len() as u32).to_le_bytes().to_vec();
    reply.extend(0_u32.to_le_bytes());
    reply.extend(unique.to_le_bytes());
    reply.extend(body);
    // The requesting process may have ended.
    let _ = device.write_all(&reply);
}

fn refuse(device: &mut File, unique: u64, errno: i32) {
    let mut reply = 16_u32.to_le_bytes().to_vec();
    reply.extend((-errno).to_le_bytes());
    reply.extend(unique.to_le_bytes());
    let _ = device.write_all(&reply);
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}
