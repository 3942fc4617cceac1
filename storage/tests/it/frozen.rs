//! A file system that stops answering: its reads are named, become errors, and hold nobody else. As
//! it needs a mount, it needs root and FUSE.

#![expect(clippy::print_stderr, reason = "what is skipped is said loudly")]
#![expect(clippy::print_stdout, reason = "the child tells the test how far it is")]
#![expect(clippy::exit, reason = "whether the child can is the question")]

use crate::fuse;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::fuse::{Frozen, NAME};
use storage::{
    BufferPool, Completion, Error, Key, Object, ReadRequest, Reader, ReaderOptions, Stage,
    StuckReads, open_url,
};

const PATIENCE: Duration = Duration::from_secs(60);

fn mount() -> Option<Frozen> {
    let mount = Frozen::mount();
    if let Err(why) = &mount {
        eprintln!("SKIPPED: no FUSE file system can be mounted here: {why}");
    }
    mount.ok()
}

fn options(pool: &Arc<BufferPool>) -> ReaderOptions {
    let mut options = ReaderOptions::new(pool);
    options.depth = Some(8);
    // What is answered is to come before that on a busy machine too.
    options.timeout = Duration::from_secs(3);
    options.warn_after = [50, 100, 150].map(Duration::from_millis);
    options
}

fn submit(reader: &mut dyn Reader, pool: &Arc<BufferPool>, object: &Arc<dyn Object>, offset: u64) {
    let (object, buf) = (Arc::clone(object), pool.take(600).unwrap());
    reader.submit(ReadRequest { object, offset, len: 600, buf, tag: offset, deadline: None });
}

fn reap(reader: &mut dyn Reader, count: usize) -> Vec<Completion> {
    let (mut came, until) = (Vec::new(), Instant::now() + PATIENCE);
    while came.len() < count && Instant::now() < until {
        reader.wait(until, &mut came).unwrap();
    }
    came
}

fn is_right(came: &Completion) -> bool {
    let mut due = (came.tag..).map(fuse::byte_at);
    came.outcome.is_ok()
        && came.bytes().len() == 600
        && came.bytes().iter().all(|b| Some(*b) == due.next())
}

/// What the library says while this test runs.
struct Heard(Mutex<Vec<String>>);

static HEARD: Heard = Heard(Mutex::new(Vec::new()));

impl log::Log for Heard {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        self.0.lock().unwrap().push(record.args().to_string());
    }

    fn flush(&self) {}
}

#[test]
fn some_reads_hang_and_the_rest_goes_on() {
    let Some(frozen) = mount() else { return };
    let _ = log::set_logger(&HEARD).map(|()| log::set_max_level(log::LevelFilter::Info));
    // By threads, as FUSE is read, and by a ring, which must not hang in a submission.
    for engine in ["auto", "ring"] {
        frozen.heal();
        let Ok(store) = open_url(&format!("file:{}?engine={engine}", frozen.folder.display()))
        else {
            eprintln!("SKIPPED: engine {engine} does not work here");
            continue;
        };
        assert_eq!(store.profile().file_system, "fuse.frozen");
        let object = store.open(&Key::new(NAME).unwrap()).unwrap();
        let pool = BufferPool::new(1 << 20);
        let mut reader = store.reader(&options(&pool)).unwrap();
        submit(&mut *reader, &pool, &object, 5);
        assert!(is_right(&reap(&mut *reader, 1)[0]));

        frozen.sicken(3 << 20);
        HEARD.0.lock().unwrap().clear();
        let offsets = [1000, 3 << 20, 2000, (3 << 20) + 70_000];
        offsets.into_iter().for_each(|offset| submit(&mut *reader, &pool, &object, offset));
        let quick = reap(&mut *reader, 2);
        assert!(quick.iter().all(is_right), "{quick:?}");
        let stuck = reap(&mut *reader, 2);
        for came in &stuck {
            let Err(error @ Error::Stuck { backend, .. }) = &came.outcome else {
                panic!("{came:?}")
            };
            assert!(backend.starts_with("fuse.frozen, "), "{backend}");
            assert!(error.to_string().contains(NAME), "{error}");
            assert!(came.tag >= 3 << 20 && came.buf.is_empty(), "{came:?}");
        }
        let oldest = StuckReads::oldest().unwrap();
        assert!(oldest.object.ends_with(NAME) && oldest.offset >= 3 << 20, "{oldest}");
        let named = format!("at byte {} of {}/{NAME}", 3 << 20, frozen.folder.display());
        let until = Instant::now() + PATIENCE;
        let heard = loop {
            let heard = HEARD.0.lock().unwrap().join("\n");
            if heard.contains(&named) || Instant::now() > until {
                break heard;
            }
            thread::sleep(Duration::from_millis(5));
        };
        assert!(heard.contains(&named), "the watchdog did not say '{named}': {heard}");

        // The reader goes on, is dropped with two that hang, and another is as good as it was.
        submit(&mut *reader, &pool, &object, 4000);
        assert!(is_right(&reap(&mut *reader, 1)[0]));
        drop(reader);
        let mut reader = store.reader(&options(&pool)).unwrap();
        submit(&mut *reader, &pool, &object, 6000);
        assert!(is_right(&reap(&mut *reader, 1)[0]));
    }
}

/// Says to the child of the next test where to read.
const FOLDER: &str = "FROZEN_FOLDER";

/// A whole process reads from a mount whose server stops: it gets an error, and can exit.
#[test]
fn a_process_survives_and_exits() {
    if let Ok(folder) = std::env::var(FOLDER) {
        read_and_exit(Path::new(&folder));
    }
    let Some(frozen) = mount() else { return };
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "frozen::a_process_survives_and_exits", "--nocapture"])
        .env(FOLDER, &frozen.folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut told = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(told.any(|line| line.unwrap().contains("ready")), "the child read nothing");
    frozen.deafen();
    drop(child.stdin.take());
    let code = code_of(&mut child);
    let told: Vec<String> = told.map_while(Result::ok).collect();
    assert_eq!(code, Some(42), "{told:?}");
    assert!(told.iter().any(|line| line.contains("no completion for")), "{told:?}");
    assert!(
        told.iter().any(|line| line.contains("cannot open it again: not done after")),
        "{told:?}"
    );
}

fn code_of(child: &mut Child) -> Option<i32> {
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    None
}

fn read_and_exit(folder: &Path) -> ! {
    let store = open_url(&format!("file:{}", folder.display())).unwrap();
    let key = Key::new(NAME).unwrap();
    let object = store.open(&key).unwrap();
    let pool = BufferPool::new(1 << 20);
    let mut reader = store.reader(&options(&pool)).unwrap();
    submit(&mut *reader, &pool, &object, 5);
    assert!(is_right(&reap(&mut *reader, 1)[0]));
    println!("ready");
    // The test closes it when the server has stopped.
    let _ = std::io::stdin().read(&mut [0]);
    submit(&mut *reader, &pool, &object, 1 << 20);
    println!("{}", reap(&mut *reader, 1).pop().unwrap().outcome.unwrap_err());
    let again = Stage::begin("open it again", Duration::from_millis(100));
    let opened = again.run(move || store.open(&key).is_ok());
    println!("{}", opened.unwrap_err());
    std::process::exit(42)
}
