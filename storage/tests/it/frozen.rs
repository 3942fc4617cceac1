//! A file system that stops responding: its reads are reported, fail, and do not block others. The
//! mount needs root and FUSE.

#![expect(clippy::print_stderr, reason = "a skipped test is reported")]
#![expect(clippy::print_stdout, reason = "the child reports its progress to the test")]
#![expect(clippy::exit, reason = "the test checks whether the child can exit")]

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

const TIMEOUT: Duration = Duration::from_secs(60);

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
    // Long enough that served reads complete before it on a busy machine.
    options.timeout = Duration::from_secs(3);
    options.warn_after = [50, 100, 150].map(Duration::from_millis);
    options
}

fn submit(reader: &mut dyn Reader, pool: &Arc<BufferPool>, object: &Arc<dyn Object>, offset: u64) {
    let (object, buf) = (Arc::clone(object), pool.take(600).unwrap());
    reader.submit(ReadRequest { object, offset, len: 600, buf, tag: offset, deadline: None });
}

fn reap(reader: &mut dyn Reader, count: usize) -> Vec<Completion> {
    let (mut completions, until) = (Vec::new(), Instant::now() + TIMEOUT);
    while completions.len() < count && Instant::now() < until {
        reader.wait(until, &mut completions).unwrap();
    }
    completions
}

fn is_correct(completion: &Completion) -> bool {
    let mut expected = (completion.tag..).map(fuse::byte_at);
    completion.outcome.is_ok()
        && completion.bytes().len() == 600
        && completion.bytes().iter().all(|b| Some(*b) == expected.next())
}

/// Collects the log lines while this test runs.
struct Heard(Mutex<Vec<String>>);

static LOG: Heard = Heard(Mutex::new(Vec::new()));

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
fn stuck_reads_do_not_block_others() {
    let Some(frozen) = mount() else { return };
    let _ = log::set_logger(&LOG).map(|()| log::set_max_level(log::LevelFilter::Info));
    // By threads, the default for FUSE, and by a ring, whose submission must not block.
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
        assert!(is_correct(&reap(&mut *reader, 1)[0]));

        frozen.stall_from(3 << 20);
        LOG.0.lock().unwrap().clear();
        let offsets = [1000, 3 << 20, 2000, (3 << 20) + 70_000];
        offsets.into_iter().for_each(|offset| submit(&mut *reader, &pool, &object, offset));
        let fast = reap(&mut *reader, 2);
        assert!(fast.iter().all(is_correct), "{fast:?}");
        let stuck = reap(&mut *reader, 2);
        for completion in &stuck {
            let Err(error @ Error::Stuck { backend, .. }) = &completion.outcome else {
                panic!("{completion:?}")
            };
            assert!(backend.starts_with("fuse.frozen, "), "{backend}");
            assert!(error.to_string().contains(NAME), "{error}");
            assert!(completion.tag >= 3 << 20 && completion.buf.is_empty(), "{completion:?}");
        }
        let oldest = StuckReads::oldest().unwrap();
        assert!(oldest.object.ends_with(NAME) && oldest.offset >= 3 << 20, "{oldest}");
        let named = format!("at byte {} of {}/{NAME}", 3 << 20, frozen.folder.display());
        let until = Instant::now() + TIMEOUT;
        let logged = loop {
            let logged = LOG.0.lock().unwrap().join("\n");
            if logged.contains(&named) || Instant::now() > until {
                break logged;
            }
            thread::sleep(Duration::from_millis(5));
        };
        assert!(logged.contains(&named), "the watchdog did not report '{named}': {logged}");

        // The reader continues, can be dropped with two stuck reads, and a new one works.
        submit(&mut *reader, &pool, &object, 4000);
        assert!(is_correct(&reap(&mut *reader, 1)[0]));
        drop(reader);
        let mut reader = store.reader(&options(&pool)).unwrap();
        submit(&mut *reader, &pool, &object, 6000);
        assert!(is_correct(&reap(&mut *reader, 1)[0]));
    }
}

/// Environment variable that gives the child of the next test its folder.
const FOLDER: &str = "FROZEN_FOLDER";

/// A process reads from a mount whose server stops: it gets an error, and can exit.
#[test]
fn a_process_with_stuck_reads_can_exit() {
    if let Ok(folder) = std::env::var(FOLDER) {
        read_and_exit(Path::new(&folder));
    }
    let Some(frozen) = mount() else { return };
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "frozen::a_process_with_stuck_reads_can_exit", "--nocapture"])
        .env(FOLDER, &frozen.folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("ready")), "the child read nothing");
    frozen.deafen();
    drop(child.stdin.take());
    let code = code_of(&mut child);
    let output: Vec<String> = lines.map_while(Result::ok).collect();
    assert_eq!(code, Some(42), "{output:?}");
    assert!(output.iter().any(|line| line.contains("no completion for")), "{output:?}");
    assert!(
        output.iter().any(|line| line.contains("cannot open it again: not done after")),
        "{output:?}"
    );
}

fn code_of(child: &mut Child) -> Option<i32> {
    let until = Instant::now() + TIMEOUT;
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
    assert!(is_correct(&reap(&mut *reader, 1)[0]));
    println!("ready");
    // The test closes stdin when the server has stopped.
    let _ = std::io::stdin().read(&mut [0]);
    submit(&mut *reader, &pool, &object, 1 << 20);
    println!("{}", reap(&mut *reader, 1).pop().unwrap().outcome.unwrap_err());
    let stage = Stage::begin("open it again", Duration::from_millis(100));
    let opened = stage.run(move || store.open(&key).is_ok());
    println!("{}", opened.unwrap_err());
    std::process::exit(42)
}
