//! The node reader, with processes that are killed. Each test starts this binary again, as the
//! ranks of a node, and compares the samples that each rank prints with those of a single process.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use loader::{
    Assemble, BatchSource, DataFile, NodeBatches, NodeClient, NodeError, NodeOptions, Open,
    PieceRef, RawBatch, Result, Sample, SampleOrder,
};

/// A small generator with a seed, so that a failing run is reproducible.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

const MICRO_BATCH: u64 = 3;
/// The node has blocks 2 and following of the eight of a step.
const NODE_FIRST: u64 = 2;
const STEP: u64 = 8 * MICRO_BATCH;
/// In the last step the node's second block has one row, those after it none.
const SAMPLES: u64 = 199 * STEP + (NODE_FIRST + 1) * MICRO_BATCH + 1;
/// As large as two thousand tokens.
const BYTES_MAX: usize = 4096;

/// The bytes of a sample: content and length depend on its number.
fn sample(number: u64, into: &mut Vec<u8>) {
    let mut random = Random(number);
    let len = random.below(BYTES_MAX as u64 / 8 + 1) as usize;
    into.clear();
    into.extend((0..len).flat_map(|_| random.next().to_le_bytes()));
}

fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The rows of blocks `NODE_FIRST..NODE_FIRST + blocks` of each step.
struct Samples {
    position: u64,
    blocks: u64,
    bad_sample: u64,
    bytes: Vec<u8>,
}

impl BatchSource for Samples {
    fn next(&mut self, into: &mut RawBatch) -> Result<bool> {
        if self.position >= SAMPLES {
            return Ok(false);
        }
        let first = (self.position + NODE_FIRST * MICRO_BATCH).min(SAMPLES);
        let end = (first + self.blocks * MICRO_BATCH).min(SAMPLES);
        into.begin(first);
        for number in first..end {
            if number == self.bad_sample {
                let error = std::io::Error::other("the disk failed");
                return Err(storage::Error::from_io("read", "corpus.bin", error).into());
            }
            sample(number, &mut self.bytes);
            into.push(&self.bytes);
        }
        self.position += STEP;
        Ok(true)
    }
}

/// The lines that a rank of a block must print, from its first sample on.
fn expected_lines(block: u64) -> Vec<String> {
    let mut bytes = Vec::new();
    let mut lines = Vec::new();
    for step in 0..SAMPLES.div_ceil(STEP) {
        let first = (step * STEP + (NODE_FIRST + block) * MICRO_BATCH).min(SAMPLES);
        let end = (first + MICRO_BATCH).min(SAMPLES);
        let mut line = format!("{}", SAMPLES.min((step + 1) * STEP));
        for number in first..end {
            sample(number, &mut bytes);
            line += &format!(" {number}:{:x}", hash(&bytes));
        }
        lines.push(line);
    }
    lines
}

fn options(job: &str, rank: u32, blocks: &[u32]) -> NodeOptions {
    NodeOptions {
        blocks: blocks.to_vec(),
        micro_batch: MICRO_BATCH as usize,
        step_samples: STEP,
        samples_end: SAMPLES,
        sample_bytes_max: BYTES_MAX,
        slots: 2,
        wait_max: Duration::from_secs(60),
        ..NodeOptions::new(job, "corpus, seed 1234", rank, blocks.len() as u32)
    }
}

fn open(blocks: u64, bad_sample: u64) -> Open {
    Arc::new(move |position| {
        Ok(Box::new(Samples { position, blocks, bad_sample, bytes: Vec::new() }))
    })
}

/// A rank, if this process was started as one: prints a line for each step.
#[test]
fn as_rank() {
    let Ok(args) = std::env::var("FEEDLINE_TEST_RANK") else { return };
    let mut args = args.split(' ');
    let job = args.next().unwrap();
    let rank: u32 = args.next().unwrap().parse().unwrap();
    let samples_consumed = args.next().unwrap().parse().unwrap();
    let pace = args.next().unwrap().parse().unwrap();
    let blocks: Vec<u32> = args.map(|block| block.parse().unwrap()).collect();
    let count = blocks.iter().max().unwrap() + 1;
    let options = NodeOptions { samples_consumed, ..options(job, rank, &blocks) };
    let mut reader = NodeClient::join(options, open(count.into(), u64::MAX)).unwrap();
    let mut random = Random(u64::from(rank));
    let mut out = std::io::stdout().lock();
    writeln!(out, "\njoined").unwrap();
    while let Some(samples) = reader.next().unwrap() {
        let rows: String =
            samples.iter().map(|(number, bytes)| format!(" {number}:{:x}", hash(bytes))).collect();
        std::thread::sleep(Duration::from_micros(random.below(pace)));
        writeln!(out, "step {}{rows}", reader.samples_consumed()).unwrap();
    }
    writeln!(out, "end").unwrap();
}

struct Rank {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
    received: Vec<String>,
    ended: bool,
}

impl Rank {
    fn start(job: &str, rank: usize, samples_consumed: u64, pace: u64, blocks: &[u32]) -> Self {
        let blocks: String = blocks.iter().map(|block| format!(" {block}")).collect();
        let args = format!("{job} {rank} {samples_consumed} {pace}{blocks}");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "node::as_rank", "--nocapture", "--test-threads=1"])
            .env("FEEDLINE_TEST_RANK", args)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        while lines.next().expect("it joins").unwrap() != "joined" {}
        Rank { child, lines, received: Vec::new(), ended: false }
    }

    /// Takes lines until there are `count`, or the end. A rank that is not read from runs ahead as
    /// far as its pipe and its ring allow, so the speeds differ.
    fn read(&mut self, count: usize) {
        while self.received.len() < count && !self.ended {
            match self.lines.next() {
                Some(line) => match line.unwrap().as_str() {
                    "end" => self.ended = true,
                    line => self.received.extend(line.strip_prefix("step ").map(str::to_owned)),
                },
                None => return,
            }
        }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.read(usize::MAX);
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn job(of: &str) -> String {
    format!("test-{of}-{}", std::process::id())
}

/// Reads all ranks in turns, so that a full pipe blocks none of them forever.
fn run_out(ranks: &mut [Option<Rank>]) {
    let steps = expected_lines(0).len();
    for count in 1..=steps + 1 {
        for rank in ranks.iter_mut().flatten() {
            rank.read(count);
        }
    }
}

/// Asserts that a rank received all steps from `from_step` on, and the end.
fn assert_complete(rank: &Rank, block: u32, from_step: usize, seed: u64) {
    assert!(rank.ended, "seed {seed}: a rank of block {block} ended early");
    assert_eq!(rank.received, expected_lines(block.into())[from_step..], "seed {seed}");
}

fn assert_no_leftovers(job: &str) {
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    assert!(!sockets.contains(job), "a socket is left over");
    for folder in ["/dev/shm", "/tmp"] {
        let Ok(entries) = std::fs::read_dir(folder) else { continue };
        for name in entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
            assert!(!name.contains(job), "{folder}/{name} is left over");
        }
    }
}

#[test]
fn each_rank_receives_its_rows() {
    for (name, blocks) in [("one", &[0][..]), ("four", &[0, 1, 2, 3]), ("twice", &[0, 0, 1, 1])] {
        let job = job(name);
        let start = |rank| Some(Rank::start(&job, rank, 0, 1, blocks));
        let mut ranks: Vec<_> = (0..blocks.len()).map(start).collect();
        run_out(&mut ranks);
        for (rank, &block) in ranks.iter().flatten().zip(blocks) {
            assert_complete(rank, block, 0, 0);
        }
        drop(ranks);
        assert_no_leftovers(&job);
    }
}

/// Kills ranks at seeded points: the one that reads, others, or one after another all but one.
#[test]
fn survivors_of_killed_ranks_receive_the_same_stream() {
    for seed in 0..6 {
        let job = job(&format!("kill{seed}"));
        let mut random = Random(seed);
        let blocks = [0, 1, 2, 3];
        let start = |rank| Some(Rank::start(&job, rank, 0, 400, &blocks));
        let mut ranks: Vec<_> = (0..4).map(start).collect();
        let mut at = 0;
        for _ in 0..=random.below(3) {
            at += 1 + random.below(50) as usize;
            let living: Vec<usize> = (0..4).filter(|&rank| ranks[rank].is_some()).collect();
            // The lowest rank joined first, so it is the first reader.
            let nth = if random.below(2) == 0 { 0 } else { random.below(living.len() as u64) };
            let victim = living[nth as usize];
            ranks.iter_mut().flatten().for_each(|rank| rank.read(at));
            let mut dead = ranks[victim].take().unwrap();
            dead.kill();
            assert_eq!(
                dead.received,
                expected_lines(victim as u64)[..dead.received.len()],
                "seed {seed}: before it was killed"
            );
        }
        run_out(&mut ranks);
        for (rank, block) in ranks.iter().zip(blocks) {
            rank.iter().for_each(|rank| assert_complete(rank, block, 0, seed));
        }
        drop(ranks);
        assert_no_leftovers(&job);
    }
}

#[test]
fn killed_rank_resumes_at_its_checkpoint() {
    for victim in [0, 2] {
        let job = job(&format!("back{victim}"));
        let blocks = [0, 1, 2];
        let start = |rank| Some(Rank::start(&job, rank, 0, 300, &blocks));
        let mut ranks: Vec<_> = (0..3).map(start).collect();
        ranks.iter_mut().flatten().for_each(|rank| rank.read(20));
        ranks[victim].take().unwrap().kill();
        ranks.iter_mut().flatten().for_each(|rank| rank.read(40));
        // From its last checkpoint, behind all others.
        ranks[victim] = Some(Rank::start(&job, victim, 10 * STEP, 300, &blocks));
        run_out(&mut ranks);
        for (nth, (rank, block)) in ranks.iter().flatten().zip(blocks).enumerate() {
            assert_complete(rank, block, if nth == victim { 10 } else { 0 }, victim as u64);
        }
    }
}

#[test]
fn killed_ranks_leave_no_sockets_or_files() {
    let job = job("all");
    let blocks = [0, 1, 2];
    for _ in 0..2 {
        let start = |rank| Some(Rank::start(&job, rank, 0, 100, &blocks));
        let mut ranks: Vec<_> = (0..3).map(start).collect();
        ranks.iter_mut().flatten().for_each(|rank| rank.read(5));
        for rank in ranks.iter_mut().flatten() {
            rank.child.kill().unwrap();
        }
        drop(ranks);
        assert_no_leftovers(&job);
    }
}

/// A page of a ring is one page, in however many processes it is mapped.
#[test]
fn ring_memory_is_shared() {
    let job = job("rss");
    let mut ranks: Vec<_> = (0..2).map(|rank| Rank::start(&job, rank, 0, 1, &[0, 1])).collect();
    ranks.iter_mut().for_each(|rank| rank.read(10));
    let maps = std::fs::read_to_string(format!("/proc/{}/smaps", ranks[1].child.id())).unwrap();
    let ring = maps.split("/memfd:feedline").nth(1).expect("a rank maps its ring");
    let kib = |name: &str| -> u64 {
        let line = ring.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    // The reader and the rank map the page: half of it counts for each.
    assert!(kib("Rss:") > 0 && kib("Pss:") * 2 <= kib("Rss:") + 4, "{ring}");
}

#[test]
fn mismatched_ranks_are_refused() {
    let job = job("differ");
    let first = NodeClient::join(options(&job, 0, &[0, 1]), open(2, u64::MAX)).unwrap();
    assert!(first.is_reader());
    let join = |options| NodeClient::join(options, open(2, u64::MAX));
    let good = options(&job, 1, &[0, 1]);
    let seed = NodeOptions { identity: "corpus, seed 4321".to_owned(), ..good.clone() };
    let error = join(seed).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, loader::Error::Node(NodeError::Mismatch { .. })), "{text}");
    assert!(text.contains("seed 4321") && text.contains("seed 1234"), "{text}");
    for bad in [
        NodeOptions { slots: 4, ..good.clone() },
        NodeOptions { micro_batch: 4, ..good.clone() },
        NodeOptions { blocks: vec![1, 0], ..good.clone() },
    ] {
        let error = join(bad).unwrap_err();
        assert!(matches!(error, loader::Error::Node(NodeError::Mismatch { .. })), "{error}");
    }
    let error = join(NodeOptions { samples_consumed: 5, ..good.clone() }).unwrap_err();
    assert!(error.to_string().contains("expected whole steps of "), "{error}");
    let error = join(options(&job, 0, &[0, 1])).unwrap_err();
    assert!(error.to_string().contains("rank 0 has joined as process "), "{error}");
    for bad in [
        NodeOptions { rank: 2, ..good.clone() },
        NodeOptions { blocks: Vec::new(), ..good.clone() },
        NodeOptions { blocks: vec![0, 2], ..good.clone() },
        NodeOptions { micro_batch: 0, ..good.clone() },
        NodeOptions { step_samples: 0, ..good.clone() },
        NodeOptions { job: String::new(), ..good.clone() },
        NodeOptions { job: "x".repeat(65), ..good.clone() },
    ] {
        assert!(matches!(join(bad).unwrap_err(), loader::Error::Option { .. }));
    }
    assert!(!join(good).unwrap().is_reader());
}

#[test]
fn read_error_reaches_every_rank_after_earlier_steps() {
    let job = job("fails");
    let bad = 9 * STEP + NODE_FIRST * MICRO_BATCH;
    let mut a = NodeClient::join(options(&job, 0, &[0, 1]), open(2, bad)).unwrap();
    let mut b = NodeClient::join(options(&job, 1, &[0, 1]), open(2, bad)).unwrap();
    for _ in 0..9 {
        assert!(a.next().unwrap().is_some() && b.next().unwrap().is_some());
    }
    for reader in [&mut a, &mut b] {
        for _ in 0..2 {
            let text = reader.next().unwrap_err().to_string();
            assert!(text.contains("the disk failed") && text.contains("corpus.bin"), "{text}");
        }
    }
    // The error for a sample above sample_bytes_max has a hint.
    let small = NodeOptions { sample_bytes_max: 64, ..options(&format!("{job}2"), 0, &[0]) };
    let mut reader = NodeClient::join(small, open(1, u64::MAX)).unwrap();
    let text = reader.next().unwrap_err().to_string();
    assert!(text.contains("hint: raise sample_bytes_max"), "{text}");
}

#[test]
fn missing_rank_is_named() {
    let job = job("late");
    let wait_max = Duration::from_secs(3);
    let first = NodeOptions { wait_max, ..options(&job, 0, &[0, 1]) };
    let mut reader = NodeClient::join(first, open(2, u64::MAX)).unwrap();
    // The reader fills its own slots, and then waits for the other rank.
    let mut count = 0;
    let error = loop {
        match reader.next() {
            Ok(_) => count += 1,
            Err(error) => break error.to_string(),
        }
    };
    assert!(count >= 2 && error.contains("rank 1, which has not joined"), "{count}: {error}");
    // The late rank joins and reads from the start.
    let mut late = NodeClient::join(options(&job, 1, &[0, 1]), open(2, u64::MAX)).unwrap();
    // The second call frees the slot of the first.
    assert!(late.next().unwrap().is_some() && late.next().unwrap().is_some());
    assert!(reader.next().unwrap().is_some());
}

/// A stuck source: the rank returns an error at its timeout, and can be dropped.
#[test]
fn stuck_read_times_out() {
    struct Stuck(std::sync::mpsc::Receiver<()>);
    impl BatchSource for Stuck {
        fn next(&mut self, _into: &mut RawBatch) -> Result<bool> {
            // Until the test has ended.
            let _ = self.0.recv();
            Ok(false)
        }
    }
    let (hold, held) = std::sync::mpsc::channel();
    let held = std::sync::Mutex::new(Some(held));
    let stuck: Open = Arc::new(move |_| Ok(Box::new(Stuck(held.lock().unwrap().take().unwrap()))));
    let first = NodeOptions { wait_max: Duration::from_secs(3), ..options(&job("stuck"), 0, &[0]) };
    let mut reader = NodeClient::join(first, stuck).unwrap();
    let text = reader.next().unwrap_err().to_string();
    assert!(text.contains("it is waiting for its own reads"), "{text}");
    drop(reader);
    drop(hold);
}

/// An order whose samples are one piece each; only the length of the piece is real.
#[derive(Debug)]
struct Lengths {
    wrong: u64,
}

impl SampleOrder for Lengths {
    fn sources(&self) -> &[DataFile] {
        &[]
    }

    fn sample_count(&self) -> u64 {
        SAMPLES
    }

    fn pieces(&self, number: u64, into: &mut Vec<PieceRef>) -> Result<()> {
        let mut bytes = Vec::new();
        sample(number, &mut bytes);
        let len_bytes = bytes.len() as u64 + u64::from(number == self.wrong);
        into.push(PieceRef { file: 0, offset_bytes: number, len_bytes });
        Ok(())
    }

    fn name(&self) -> String {
        "lengths".to_owned()
    }
}

/// Batches of hashes.
#[derive(Debug)]
struct Hashes;

impl Assemble for Hashes {
    type Batch = Vec<String>;

    fn begin(&mut self, batch: &mut Vec<String>, _first_sample: u64, _rows: usize) {
        batch.clear();
    }

    fn set_row(&mut self, batch: &mut Vec<String>, row: usize, sample: &Sample<'_>) -> Result<()> {
        assert_eq!((batch.len(), sample.pieces.len()), (row, 1));
        batch.push(format!(" {}:{:x}", sample.number, hash(sample.bytes)));
        Ok(())
    }
}

#[test]
fn batches_are_assembled_from_node_samples() {
    let start = |of: &str, wrong| {
        let reader = NodeClient::join(options(&job(of), 0, &[0]), open(1, u64::MAX)).unwrap();
        NodeBatches::new(reader, Arc::new(Lengths { wrong }), Hashes)
    };
    let mut batches = start("assemble", u64::MAX);
    let mut lines = Vec::new();
    while let Some(batch) = batches.next_batch().unwrap() {
        lines.push(format!("{}{}", batches.samples_consumed(), batch.concat()));
        batches.recycle(batch);
    }
    assert_eq!(lines, expected_lines(0));
    // The error of a rank with another index names the sample.
    let text = start("differs", NODE_FIRST * MICRO_BATCH).next_batch().unwrap_err().to_string();
    assert!(text.contains("sample 6 of lengths"), "{text}");
}
