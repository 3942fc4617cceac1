//! The node reader with real files: two processes share the samples that one of them reads.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use indexed::Dtype;
use loader::batch::{GptAssemble, GptConfig};
use loader::{Batch, Error, LoaderOptions, NodeBatches, NodeOptions, Ranks};

use super::corpus::{Corpus, SAMPLES, SEQ_LEN, digest_of, options, order, rows, start};

/// Two ranks of the node and a third elsewhere; the last step is short.
const RANKS: Ranks = Ranks { first: 1, count: 2, of: 3 };

fn loader_options(samples_consumed: u64, ranks: Ranks) -> LoaderOptions {
    let mut options = options();
    options.micro_batch = 7;
    (options.samples, options.ranks) = (samples_consumed..SAMPLES, ranks);
    options
}

fn node(job: &str, rank: u32, ranks: u32) -> NodeOptions {
    NodeOptions {
        sample_bytes_max: (SEQ_LEN + 1) * 2,
        slots: 2,
        wait_max: Duration::from_secs(60),
        ..NodeOptions::new(job, "seed 5", rank, ranks)
    }
}

fn batches(path: &str, options: LoaderOptions, node: NodeOptions) -> NodeBatches<GptAssemble> {
    let order = order(&storage::open_url(path).unwrap());
    let assemble = GptAssemble::new(GptConfig::new(SEQ_LEN), vec![Dtype::U16]).unwrap();
    NodeBatches::start(order, assemble, options, node).unwrap()
}

/// The line of a step: the samples consumed by all ranks so far, and the samples of this rank.
fn line(samples_consumed: u64, batch: &Batch) -> String {
    let mut all = Vec::new();
    rows(batch, &mut all);
    let rows =
        all.iter().map(|(sample, text)| format!(" {sample}:{}", digest_of([text].into_iter())));
    format!("{samples_consumed}{}", rows.collect::<String>())
}

/// The lines that a rank of the node must print, from a loader for this rank alone.
fn expected_lines(corpus: &Corpus, rank: u32) -> Vec<String> {
    let ranks = Ranks::one(RANKS.first + rank, RANKS.of);
    let mut loader = start(&corpus.store(), loader_options(0, ranks));
    let mut lines = Vec::new();
    while let Some(batch) = loader.next_batch().unwrap() {
        lines.push(line(loader.samples_consumed(), &batch));
    }
    lines
}

/// A rank, if this process was started as one: prints a line for each step.
#[test]
fn as_rank() {
    let Ok(args) = std::env::var("FEEDLINE_TEST_STREAM_RANK") else { return };
    let args: Vec<&str> = args.splitn(4, ' ').collect();
    let options = loader_options(args[2].parse().unwrap(), RANKS);
    let node = node(args[0], args[1].parse().unwrap(), RANKS.count);
    let mut batches = batches(args[3], options, node);
    let mut out = std::io::stdout().lock();
    writeln!(out, "\njoined").unwrap();
    while let Some(batch) = batches.next_batch().unwrap() {
        writeln!(out, "step {}", line(batches.samples_consumed(), &batch)).unwrap();
        batches.recycle(batch);
        std::thread::sleep(Duration::from_millis(1));
    }
    writeln!(out, "end").unwrap();
}

struct Rank {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Rank {
    fn start(corpus: &Corpus, job: &str, rank: u32, samples_consumed: u64) -> Self {
        let args = format!("{job} {rank} {samples_consumed} {}", corpus.path);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "stream::node::as_rank", "--nocapture", "--test-threads=1"])
            .env("FEEDLINE_TEST_STREAM_RANK", args)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        while lines.next().expect("it joins").unwrap() != "joined" {}
        Rank { child, lines }
    }

    /// The lines of so many steps, or of all that there are.
    fn read(&mut self, count: usize) -> Vec<String> {
        let lines = self.lines.by_ref().map(Result::unwrap).take_while(|line| line != "end");
        let steps = lines.filter_map(|line| line.strip_prefix("step ").map(str::to_owned));
        steps.take(count).collect()
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn job(of: &str) -> String {
    format!("test-stream-{of}-{}", std::process::id())
}

#[test]
fn two_processes_receive_what_each_would_read_alone() {
    let (corpus, job) = (Corpus::new(), job("two"));
    let mut ranks = [0, 1].map(|rank| Rank::start(&corpus, &job, rank, 0));
    for (rank, nth) in ranks.iter_mut().zip(0..) {
        assert_eq!(rank.read(usize::MAX), expected_lines(&corpus, nth), "rank {nth}");
    }
}

/// The first rank joins first, so it is the reader.
#[test]
fn another_rank_takes_over_when_the_reader_is_killed() {
    let (corpus, job) = (Corpus::new(), job("kill"));
    let expected = [0, 1].map(|rank| expected_lines(&corpus, rank));
    let mut first = Rank::start(&corpus, &job, 0, 0);
    let mut second = Rank::start(&corpus, &job, 1, 0);
    let mut lines = [first.read(20), second.read(15)];
    drop(first);
    // The killed rank restarts at a checkpoint, behind the other.
    let checkpoint: u64 = lines[0][9].split(' ').next().unwrap().parse().unwrap();
    lines[0].truncate(10);
    let mut again = Rank::start(&corpus, &job, 0, checkpoint);
    lines[1].extend(second.read(usize::MAX));
    lines[0].extend(again.read(usize::MAX));
    assert_eq!(lines, expected);
}

#[test]
fn node_must_have_as_many_blocks_as_ranks() {
    let corpus = Corpus::new();
    let order = order(&corpus.store());
    let assemble = GptAssemble::new(GptConfig::new(SEQ_LEN), vec![Dtype::U16]).unwrap();
    let three = node(&job("three"), 0, 3);
    let error = NodeBatches::start(order, assemble, loader_options(0, RANKS), three).unwrap_err();
    assert!(matches!(error, Error::Option { name: "blocks", found: 3, .. }), "{error}");
    // Alone on its node, and at the end of all samples.
    let mut last =
        batches(&corpus.path, loader_options(SAMPLES - 1, Ranks::ALONE), node(&job("last"), 0, 1));
    assert_eq!(last.next_batch().unwrap().unwrap().rows, 1);
    assert_eq!(last.samples_consumed(), SAMPLES);
    assert_eq!(last.next_batch().unwrap(), None);
}
