//! Simulated stores pass the conformance suite, and take the time of their model: in virtual time,
//! so that no test depends on the speed of this machine.

use std::sync::Arc;
use std::time::Duration;

use storage::simulate::{SimCounters, Simulation, StoreModel};
use storage::testing::conformance;
use storage::{Error, Key, Object, RangeRead, Storage, open_url, read_all, write_all};

/// A store whose requests take a millisecond each, without spread, with 100 MB/s per server.
const PLAIN: &str = "
name = 'plain'
[latency_us]
read = [1000, 1000]
write = [1000, 1000]
commit = [5000, 5000]
meta = [2000, 2000]
[servers]
count = 4
mb_per_s = 100
in_flight = 8
request_kib = 1024
stripe_kib = 1024
stripes = 1
[client]
mb_per_s = 1000
in_flight_mib = 64
[meta]
per_s = 1000
list_page = 10
";

const MIB: usize = 1 << 20;

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

/// A folder, a simulation over it with overrides, and the store.
struct Made {
    _folder: tempfile::TempDir,
    sim: Arc<Simulation>,
    store: Arc<dyn Storage>,
    /// The same bytes without the simulation.
    plain: Arc<dyn Storage>,
}

fn made(text: &str, overrides: &[&str], seed: u64) -> Made {
    let folder = tempfile::tempdir().unwrap();
    let sim = Simulation::counted(StoreModel::parse(text, overrides).unwrap(), seed);
    let plain = open_url(folder.path().to_str().unwrap()).unwrap();
    let store = sim.wrap(Arc::clone(&plain));
    Made { _folder: folder, sim, store, plain }
}

impl Made {
    /// An object that took no simulated time to write.
    fn object(&self, name: &str, len: usize) -> Arc<dyn Object> {
        write_all(&*self.plain, &key(name), &vec![7; len]).unwrap();
        self.store.open(&key(name)).unwrap()
    }

    /// The simulated time that `act` takes, in milliseconds.
    fn ms(&self, act: impl FnOnce()) -> f64 {
        let before = self.sim.elapsed();
        act();
        (self.sim.elapsed() - before).as_secs_f64() * 1e3
    }
}

fn read(object: &dyn Object, offset: u64, len: usize) -> Result<(), Error> {
    let mut buf = vec![0; len];
    object.read_many(&mut [RangeRead { offset, buf: &mut buf }])?;
    assert!(buf.iter().all(|&byte| byte == 7), "expected the bytes written, found others");
    Ok(())
}

fn near(found: f64, expected: f64, share: f64) {
    let is_near = (found - expected).abs() <= expected * share;
    assert!(is_near, "expected {expected} within {share}, found {found}");
}

#[test]
fn simulated_stores_pass_the_conformance_suite() {
    let folder = tempfile::tempdir().unwrap();
    let count = std::cell::Cell::new(0);
    let make = |text: &str| {
        count.set(count.get() + 1);
        let root = folder.path().join(count.get().to_string());
        let sim = Simulation::counted(StoreModel::parse(text, &[]).unwrap(), 3);
        sim.wrap(open_url(root.to_str().unwrap()).unwrap())
    };
    conformance::run(&|| make(PLAIN));
    storage::testing::reader_conformance::run(&|| make(PLAIN));
    conformance::run_objects(&|| make(StoreModel::built_in("s3").unwrap()));
}

/// The median and the 99th percentile of the drawn latencies are those of the model.
#[test]
fn latencies_are_distributed_as_the_model_says() {
    let made = made(PLAIN, &["latency_us.read=[1000, 8000]", "servers.mb_per_s=1e9"], 17);
    let object = made.object("a", 4096);
    let mut all: Vec<f64> =
        (0..20_000).map(|_| made.ms(|| read(&*object, 0, 1).unwrap())).collect();
    all.sort_by(f64::total_cmp);
    near(all[all.len() / 2], 1.0, 0.03);
    near(all[all.len() * 99 / 100], 8.0, 0.08);
    // In a log-normal distribution the first percentile is as far below the median as the 99th is
    // above it.
    near(all[all.len() / 100], 1.0 / 8.0, 0.08);
}

#[test]
fn bytes_take_the_rate_of_servers_streams_and_link() {
    let mib_ms = MIB as f64 / 100e6 * 1e3;
    let of = |overrides: &[&str]| {
        let made = made(PLAIN, overrides, 1);
        let object = made.object("a", 8 * MIB);
        made.ms(|| read(&*object, 0, 8 * MIB).unwrap())
    };
    near(of(&[]), 8.0 * mib_ms + 1.0, 1e-6);
    // Two of eight pieces on each of four servers.
    near(of(&["servers.stripes=4"]), 2.0 * mib_ms + 1.0, 1e-6);
    near(of(&["servers.stripes=0"]), 2.0 * mib_ms + 1.0, 1e-6);
    near(of(&["servers.stripes=4", "client.mb_per_s=200"]), 4.0 * mib_ms + 1.0, 1e-6);
    near(of(&["servers.stripes=4", "servers.stream_mb_per_s=10"]), 10.0 * mib_ms + 1.0, 1e-6);
    near(of(&["client.requests_per_s=10"]), 801.0, 1e-6);
}

#[test]
fn a_server_limits_its_concurrent_requests() {
    let of = |in_flight: u32| {
        let made = made(PLAIN, &[&format!("servers.in_flight={in_flight}")], 1);
        let object = made.object("a", 4096);
        let mut bufs = [[0; 1]; 8];
        let mut reads: Vec<RangeRead<'_>> =
            bufs.iter_mut().map(|buf| RangeRead { offset: 0, buf: &mut buf[..] }).collect();
        made.ms(|| object.read_many(&mut reads).unwrap())
    };
    near(of(8), 1.0, 1e-3);
    near(of(2), 4.0, 1e-3);
    near(of(1), 8.0, 1e-3);
}

#[test]
fn time_of_metadata_and_uploads() {
    let made = made(PLAIN, &[], 1);
    // One metadata request, two writes of a megabyte, one commit.
    let written = 2.0 * MIB as f64 / 100e6 * 1e3 + 1.0;
    let took = made.ms(|| drop(write_all(&*made.store, &key("a"), &[7; 2 * MIB]).unwrap()));
    near(took, 2.0 + 1.0 + written + 5.0, 1e-3);
    assert_eq!(read_all(&*made.store, &key("a")).unwrap(), [7; 2 * MIB]);
    for name in 0..24 {
        write_all(&*made.plain, &key(&format!("many/{name}")), b"").unwrap();
    }
    let listed = made.ms(|| assert_eq!(made.store.list(&key("many")).unwrap().len(), 24));
    near(listed, 3.0 * 2.0 + 1.0, 1e-3);
    // One for the folder, one for each name.
    near(made.ms(|| made.store.delete_folder(&key("many")).unwrap()), 25.0 * 2.0 + 1.0, 1e-3);
    let SimCounters { writes, commits, read_bytes, written_bytes, .. } = made.sim.counters();
    assert_eq!((writes, commits, read_bytes, written_bytes), (2, 1, 2 << 20, 2 << 20));
}

/// A writer waits only for bytes beyond those that the client keeps in flight.
#[test]
fn a_writer_waits_only_beyond_the_client_limit() {
    let made = made(PLAIN, &["client.in_flight_mib=4"], 1);
    let mut upload = made.store.create(&key("a"), 0).unwrap();
    let four = made.ms(|| upload.write(&[7; 4 * MIB]).unwrap());
    near(four + 1.0, 1.0, 1e-9);
    let mib_ms = MIB as f64 / 100e6 * 1e3;
    near(made.ms(|| upload.write(&[7; MIB]).unwrap()), mib_ms + 1.0, 0.2);
    upload.finish().unwrap();
}

#[test]
fn equal_seeds_give_equal_outcomes() {
    let outcomes_of = |seed| {
        let text = format!(
            "{PLAIN}[[failure]]\nof = 'read'\nper_million = 100_000\nerrno = 'EIO'\n\
             [[stall]]\nof = 'read'\nper_million = 50_000\nms = 700\n"
        );
        let made = made(&text, &["latency_us.read=[1000, 9000]"], seed);
        let object = made.object("a", 4096);
        let outcomes: Vec<(bool, u64)> = (0..400)
            .map(|_| {
                let ok = read(&*object, 0, 1).is_ok();
                (ok, made.sim.elapsed().as_nanos() as u64)
            })
            .collect();
        (outcomes, made.sim.counters())
    };
    let (one, counters) = outcomes_of(5);
    assert_eq!((&one, counters), (&outcomes_of(5).0, outcomes_of(5).1));
    assert_ne!(one, outcomes_of(6).0);
    // 400 draws of 10 % and of 5 %: five standard deviations are 30 and 22.
    assert!((10..=70).contains(&counters.failures), "{counters:?}");
    assert!((1..=42).contains(&counters.stalls), "{counters:?}");
    assert_eq!(counters.failures, one.iter().filter(|(ok, _)| !ok).count() as u64);
}

#[test]
fn failures_have_the_errno_of_the_model() {
    for (errno, op, expected) in [
        ("EIO", "read", "Input/output error"),
        ("ESTALE", "read", "stale file handle"),
        ("ENOSPC", "write", "no space left"),
        ("ENOSPC", "commit", "no space left"),
        ("EACCES", "meta", "Permission denied"),
    ] {
        let text = format!(
            "{PLAIN}[[failure]]\nof = '{op}'\nper_million = 1_000_000\nerrno = '{errno}'\n"
        );
        let made = made(&text, &[], 1);
        write_all(&*made.plain, &key("a"), &[7; 100]).unwrap();
        let outcome = match op {
            "read" => read_all(&*made.store, &key("a")).map(drop),
            _ => write_all(&*made.store, &key("b"), &[7; 100]).map(drop),
        };
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(expected), "{errno} of {op}: {error}");
        assert!(made.plain.open(&key("b")).is_err(), "{errno} of {op}: the object exists");
    }
}

/// A stall takes no bandwidth: a concurrent read from the same server is not delayed.
#[test]
fn a_stall_delays_no_other_request() {
    let text = format!("{PLAIN}[[stall]]\nof = 'write'\nper_million = 1_000_000\nms = 60_000\n");
    let made = made(&text, &["servers.count=1"], 1);
    let object = made.object("a", 4096);
    let mut upload = made.store.create(&key("b"), 0).unwrap();
    near(1.0 + made.ms(|| upload.write(&[7; MIB]).unwrap()), 1.0, 1e-9);
    let mib_ms = MIB as f64 / 100e6 * 1e3;
    near(made.ms(|| read(&*object, 0, 1).unwrap()), mib_ms + 1.0, 1e-3);
    near(made.ms(|| drop(upload.finish().unwrap())), 60_005.0, 1e-3);
    assert_eq!(made.sim.counters().stalls, 1);
}

#[test]
fn built_in_models_are_labelled_as_simulated() {
    for name in StoreModel::NAMES {
        let model = StoreModel::named(name).unwrap();
        assert_eq!(model.name, name);
        let folder = tempfile::tempdir().unwrap();
        let sim = Simulation::new(model, 1);
        let store = sim.wrap(open_url(folder.path().to_str().unwrap()).unwrap());
        let profile = store.profile();
        assert_eq!(profile.file_system, format!("simulated {name}"));
        assert!(profile.is_simulated() && profile.kind() == name);
        assert!(profile.to_string().contains("simulated"), "{profile}");
        assert_eq!(sim.label(), format!("simulated: {name}"));
        assert!(sim.about().contains("not measured"), "{}", sim.about());
        assert!(!store.has_atomic_publish(&Key::root()).unwrap());
    }
    assert!(StoreModel::named("tape").is_none());
}

/// In real time a call returns no sooner than in the model, with the same bytes.
#[test]
fn a_real_time_simulation_waits() {
    let folder = tempfile::tempdir().unwrap();
    let sim = Simulation::new(StoreModel::parse(PLAIN, &[]).unwrap(), 1);
    let store = sim.wrap(open_url(folder.path().to_str().unwrap()).unwrap());
    write_all(&*store, &key("a"), b"all of it").unwrap();
    assert_eq!(read_all(&*store, &key("a")).unwrap(), b"all of it");
    // Two metadata requests, one write, one commit and one read.
    let least = Duration::from_millis(2 + 2 + 1 + 5 + 1);
    let took = sim.elapsed();
    assert!(took >= least, "expected {least:?} or more, took {took:?}");
}

#[test]
fn invalid_models_are_refused_by_name() {
    for (overrides, expected) in [
        (&["servers.stripes=9"] as &[&str], "servers.stripes"),
        (&["servers.count=0"], "servers.count"),
        (&["servers.count=100000"], "servers.count"),
        (&["servers.count=-1"], "count"),
        (&["servers.mb_per_s=0"], "servers.mb_per_s"),
        (&["client.mb_per_s=nan"], "client.mb_per_s"),
        (&["latency_us.read=[5, 4]"], "latency_us.read"),
        (&["latency_us.read=[0, 4]"], "latency_us.read"),
        (&["latency_us.read=[1, inf]"], "latency_us.read"),
        (&["servers.stripe=1"], "stripe"),
        (&["disks.count=1"], "no such section"),
        (&["servers.count"], "no '='"),
        (&["servers.count=many"], "no TOML value"),
        (&["stall=[{of='read', per_million=1}]"], "ms"),
        (&["failure=[{of='read', per_million=1, errno='EOF'}]"], "EOF"),
    ] {
        let error = StoreModel::parse(PLAIN, overrides).unwrap_err().to_string();
        assert!(error.contains(expected), "{overrides:?}: {error}");
    }
    assert!(StoreModel::parse("name = ", &[]).is_err());
    assert!(StoreModel::parse("", &[]).unwrap_err().to_string().contains("name"));
}
