//! A rank's micro-batches, in their order.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use loader::{
    Assemble, Loader, LoaderOptions, NodeBatches, NodeOptions, Ranks, Sample, SampleCache,
};
use recipe::Incompatible;
use recipe::config::Config;
use recipe::mesh::{MeshRank, MicroBatchShare};

use crate::order_check::OrderCheck;
use crate::{AnyAssemble, AnyBatch, Error, Result, Samples};

/// The ranks of one machine, which have one reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePeers {
    /// Names the run among all of this user's on the machine, at most 40 bytes.
    pub job: String,
    /// The ranks, this one among them, ascending.
    pub ranks: Vec<usize>,
}

impl NodePeers {
    /// The same for one of several things that they read.
    pub(super) fn job(&self, what: &str) -> Self {
        NodePeers { job: format!("{}-{what}", self.job), ranks: self.ranks.clone() }
    }
}

/// Micro-batches in their order, with every token checked against the vocabulary.
#[derive(Debug)]
pub struct Batches {
    of: Samples,
    how: ReadSettings,
    /// What is still to be read, in runs of steps that are alike, the last first.
    stretches: Vec<SampleStretch>,
    feed: Option<BatchFeed>,
    ready: VecDeque<AnyBatch>,
    /// The check of cached orders that runs beside.
    kept: Option<OrderCheck>,
}

/// What all reads of a rank have in common.
#[derive(Debug)]
struct ReadSettings {
    /// Rows of a micro-batch.
    micro: usize,
    /// Micro-batches that are read ahead.
    prefetch: u64,
    /// Whether what is read is verified.
    verify: bool,
    share: MicroBatchShare,
    replica: usize,
    replicas: usize,
    node: Option<NodeShare>,
    vocab: u64,
}

/// The ranks of a node, and which block of rows each of them takes.
#[derive(Clone, Debug)]
struct NodeShare {
    job: String,
    rank: u32,
    blocks: Vec<u32>,
    first: u32,
    count: u32,
    sample_bytes_max: usize,
}

/// Samples that are read in steps of one size.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SampleStretch {
    samples: Range<u64>,
    global: u64,
}

/// Where batches come from.
#[derive(Debug)]
enum BatchFeed {
    Own(Loader<MicroBatchCutter<AnyAssemble>>),
    Node(Box<NodeBatches<MicroBatchCutter<AnyAssemble>>>),
}

impl Batches {
    /// `neighbours` are those to read with, and how many bytes a sample has at most.
    pub(super) fn new(
        of: &Samples,
        config: &Config,
        seat: MeshRank,
        samples: Range<u64>,
        neighbours: Option<(NodePeers, usize)>,
        kept: Option<OrderCheck>,
    ) -> Result<Self> {
        let (mesh, replica) = (seat.mesh, seat.place().dp);
        let how = ReadSettings {
            micro: config.batch.micro as usize, // fits: the config refuses more than 2^16
            prefetch: config.data.prefetch_batches,
            verify: config.data.verify,
            share: config.share(mesh.dp),
            replica,
            replicas: mesh.dp,
            node: neighbours.and_then(|neighbours| NodeShare::new(neighbours, seat)),
            vocab: config.model.vocab,
        };
        let mut stretches = stretches(config, samples);
        stretches.reverse();
        let mut batches =
            Batches { of: of.clone(), how, stretches, feed: None, ready: VecDeque::new(), kept };
        // What cannot be read is known now, and reading begins.
        batches.feed = batches.next_feed()?;
        Ok(batches)
    }

    /// Fills `into` with the next `count` batches, or fewer at the end. What it held is let go.
    ///
    /// # Errors
    /// [`Error::Loader`]; [`Error::Mismatch`] for a token that the model does not have;
    /// [`Error::Indexed`] for a cached sample order that was found to be damaged.
    pub fn fill(&mut self, count: u64, into: &mut Vec<AnyBatch>) -> Result<()> {
        self.recycle(into);
        while (into.len() as u64) < count {
            if let Some(batch) = self.ready.pop_front() {
                into.push(batch);
                continue;
            }
            let Some(feed) = &mut self.feed else { break };
            match feed.next()? {
                Some(step) => {
                    step.iter().try_for_each(|batch| self.how.check(batch))?;
                    self.ready.extend(step);
                }
                None => self.feed = self.next_feed()?,
            }
        }
        self.kept.as_ref().map_or(Ok(()), OrderCheck::look)
    }

    fn recycle(&mut self, into: &mut Vec<AnyBatch>) {
        let spent = std::mem::take(into);
        match &mut self.feed {
            Some(BatchFeed::Own(loader)) if !spent.is_empty() => loader.recycle(spent),
            Some(BatchFeed::Node(node)) if !spent.is_empty() => node.recycle(spent),
            _ => {}
        }
    }

    fn next_feed(&mut self) -> Result<Option<BatchFeed>> {
        let Some(SampleStretch { samples, global }) = self.stretches.pop() else { return Ok(None) };
        let ReadSettings { micro, replicas, replica, .. } = self.how;
        // fits: rows of a step, which are in memory.
        let rows = match self.how.share {
            MicroBatchShare::Run => global as usize / replicas,
            MicroBatchShare::Stride => micro,
        };
        let mut how = LoaderOptions::new(rows, samples.clone());
        how.batches_min = self.how.prefetch.div_ceil((rows / micro) as u64);
        how.verify = self.how.verify;
        how.near = self.of.local.clone().map(|local| local as Arc<dyn SampleCache>);
        how.ranks = Ranks::one(replica as u32, replicas as u32); // fits: replicas are processes
        let cut = MicroBatchCutter { inner: self.of.assembly.assemble()?, rows: micro };
        let order = Arc::clone(&self.of.order);
        let Some(node) = &self.how.node else {
            return Ok(Some(BatchFeed::Own(Loader::start(order, cut, how)?)));
        };
        how.ranks = Ranks { first: node.first, count: node.count, of: replicas as u32 };
        // A stretch is a thing of its own: ranks come to its end one after the other.
        let job = format!("{}-{}", node.job, samples.start);
        let mut options = NodeOptions::new(&job, &order.name(), node.rank, 1);
        options.blocks.clone_from(&node.blocks);
        options.sample_bytes_max = node.sample_bytes_max;
        Ok(Some(BatchFeed::Node(Box::new(NodeBatches::start(order, cut, how, options)?))))
    }
}

impl ReadSettings {
    fn check(&self, batch: &AnyBatch) -> Result<()> {
        let is_other = |token: &i64| u64::try_from(*token).map_or(true, |id| id >= self.vocab);
        let Some(worst) = batch.tokens().find(is_other) else { return Ok(()) };
        let first = batch.first_sample();
        let last = first + batch.rows() as u64 - 1;
        Err(Error::Mismatch(Incompatible::new(
            format!("cannot read samples {first} to {last}"),
            format!("expected token ids below model.vocab = {}, found {worst}", self.vocab),
            "raise model.vocab, or tokenize the corpus again with data.tokenizer",
        )))
    }
}

impl NodeShare {
    /// `None` if this rank reads alone, or the replicas of the node do not follow one another.
    fn new((neighbours, sample_bytes_max): (NodePeers, usize), seat: MeshRank) -> Option<Self> {
        let NodePeers { job, ranks } = neighbours;
        let rank = ranks.iter().position(|rank| *rank == seat.rank).filter(|_| ranks.len() > 1)?;
        let replicas: Vec<usize> = ranks.iter().map(|rank| seat.mesh.place(*rank).dp).collect();
        let first = *replicas.iter().min()?;
        let count = replicas.iter().max()? + 1 - first;
        let is_there = |replica: usize| replicas.contains(&(first + replica));
        if !(0..count).all(is_there) {
            return None;
        }
        // fits: replicas and ranks are processes.
        let blocks = replicas.iter().map(|replica| (replica - first) as u32).collect();
        let (rank, first, count) = (rank as u32, first as u32, count as u32);
        Some(NodeShare { job, rank, blocks, first, count, sample_bytes_max })
    }
}

impl BatchFeed {
    fn next(&mut self) -> Result<Option<Vec<AnyBatch>>> {
        Ok(match self {
            BatchFeed::Own(loader) => loader.next_batch()?,
            BatchFeed::Node(node) => node.next_batch()?,
        })
    }
}

/// Runs of steps of one size.
fn stretches(config: &Config, samples: Range<u64>) -> Vec<SampleStretch> {
    let mut all: Vec<SampleStretch> = Vec::new();
    let mut at = samples.start;
    while at < samples.end {
        let global = config.batch.at(at);
        let is_last = global == config.batch.global;
        let end = if is_last { samples.end } else { (at + global).min(samples.end) };
        match all.last_mut().filter(|last| last.global == global) {
            Some(last) => last.samples.end = end,
            None => all.push(SampleStretch { samples: at..end, global }),
        }
        at = end;
    }
    all
}

/// Cuts what a step reads into micro-batches of so many rows.
#[derive(Debug)]
struct MicroBatchCutter<A> {
    inner: A,
    rows: usize,
}

impl<A: Assemble> Assemble for MicroBatchCutter<A> {
    type Batch = Vec<A::Batch>;

    fn begin(&mut self, batch: &mut Self::Batch, first_sample: u64, rows: usize) {
        batch.resize_with(rows.div_ceil(self.rows), Default::default);
        for (number, micro) in batch.iter_mut().enumerate() {
            let first = number * self.rows;
            self.inner.begin(micro, first_sample + first as u64, self.rows.min(rows - first));
        }
    }

    fn set_row(
        &mut self,
        batch: &mut Self::Batch,
        row: usize,
        sample: &Sample<'_>,
    ) -> loader::Result<()> {
        self.inner.set_row(&mut batch[row / self.rows], row % self.rows, sample)
    }

    fn finish(&mut self, batch: &mut Self::Batch) -> loader::Result<()> {
        batch.iter_mut().try_for_each(|micro| self.inner.finish(micro))
    }
}
