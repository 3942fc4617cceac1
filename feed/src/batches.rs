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

/// The ranks of one machine, which share a node reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePeers {
    /// Identifies the run among those of this user on the machine, at most 40 bytes.
    pub job: String,
    /// The ranks, including this one, ascending.
    pub ranks: Vec<usize>,
}

impl NodePeers {
    /// The same ranks for one of several streams that they read.
    pub(super) fn job(&self, what: &str) -> Self {
        NodePeers { job: format!("{}-{what}", self.job), ranks: self.ranks.clone() }
    }
}

/// Micro-batches in their order, with every token checked against the vocabulary.
#[derive(Debug)]
pub struct Batches {
    source: Samples,
    settings: ReadSettings,
    /// The samples still to be read, in runs of steps of one size, the last first.
    stretches: Vec<SampleStretch>,
    feed: Option<BatchFeed>,
    ready: VecDeque<AnyBatch>,
    /// The check of cached orders in the background.
    order_check: Option<OrderCheck>,
}

/// Settings of all reads of a rank.
#[derive(Debug)]
struct ReadSettings {
    /// Rows of a micro-batch.
    micro: usize,
    /// Micro-batches to read ahead.
    prefetch: u64,
    /// Whether reads are verified.
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

/// Samples read in steps of one size.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SampleStretch {
    samples: Range<u64>,
    global: u64,
}

/// The source of batches: a loader of this rank, or the node reader.
#[derive(Debug)]
enum BatchFeed {
    Own(Loader<MicroBatchCutter<AnyAssemble>>),
    Node(Box<NodeBatches<MicroBatchCutter<AnyAssemble>>>),
}

impl Batches {
    /// `peers` are the ranks to read with, and the maximum bytes of a sample.
    pub(super) fn new(
        source: &Samples,
        config: &Config,
        mesh_rank: MeshRank,
        samples: Range<u64>,
        peers: Option<(NodePeers, usize)>,
        order_check: Option<OrderCheck>,
    ) -> Result<Self> {
        let (mesh, replica) = (mesh_rank.mesh, mesh_rank.place().dp);
        let settings = ReadSettings {
            micro: config.batch.micro as usize, // fits: the config refuses more than 2^16
            prefetch: config.data.prefetch_batches,
            verify: config.data.verify,
            share: config.share(mesh.dp),
            replica,
            replicas: mesh.dp,
            node: peers.and_then(|peers| NodeShare::new(peers, mesh_rank)),
            vocab: config.model.vocab,
        };
        let mut stretches = stretches(config, samples);
        stretches.reverse();
        let mut batches = Batches {
            source: source.clone(),
            settings,
            stretches,
            feed: None,
            ready: VecDeque::new(),
            order_check,
        };
        // Starts reading, and reports errors at once.
        batches.feed = batches.next_feed()?;
        Ok(batches)
    }

    /// Fills `into` with the next `count` batches, or fewer at the end. Its previous batches are
    /// recycled.
    ///
    /// # Errors
    /// [`Error::Loader`]; [`Error::Mismatch`] for a token that the model does not have;
    /// [`Error::Indexed`] for a cached sample order that was found to be corrupt.
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
                    step.iter().try_for_each(|batch| self.settings.check(batch))?;
                    self.ready.extend(step);
                }
                None => self.feed = self.next_feed()?,
            }
        }
        self.order_check.as_ref().map_or(Ok(()), OrderCheck::poll)
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
        let ReadSettings { micro, replicas, replica, .. } = self.settings;
        // fits: rows of a step, which are in memory.
        let rows = match self.settings.share {
            MicroBatchShare::Run => global as usize / replicas,
            MicroBatchShare::Stride => micro,
        };
        let mut options = LoaderOptions::new(rows, samples.clone());
        options.batches_min = self.settings.prefetch.div_ceil((rows / micro) as u64);
        options.verify = self.settings.verify;
        options.sample_cache = self.source.local.clone().map(|local| local as Arc<dyn SampleCache>);
        options.ranks = Ranks::one(replica as u32, replicas as u32); // fits: replicas are processes
        let cut = MicroBatchCutter { inner: self.source.assembly.assemble()?, rows: micro };
        let order = Arc::clone(&self.source.order);
        let Some(node) = &self.settings.node else {
            return Ok(Some(BatchFeed::Own(Loader::start(order, cut, options)?)));
        };
        options.ranks = Ranks { first: node.first, count: node.count, of: replicas as u32 };
        // Each stretch has a job id of its own, because ranks do not reach its end at the same
        // time.
        let job = format!("{}-{}", node.job, samples.start);
        let mut node_options = NodeOptions::new(&job, &order.name(), node.rank, 1);
        node_options.blocks.clone_from(&node.blocks);
        node_options.sample_bytes_max = node.sample_bytes_max;
        let batches = NodeBatches::start(order, cut, options, node_options)?;
        Ok(Some(BatchFeed::Node(Box::new(batches))))
    }
}

impl ReadSettings {
    fn check(&self, batch: &AnyBatch) -> Result<()> {
        let is_invalid = |token: &i64| u64::try_from(*token).map_or(true, |id| id >= self.vocab);
        let Some(invalid) = batch.tokens().find(is_invalid) else { return Ok(()) };
        let first = batch.first_sample();
        let last = first + batch.rows() as u64 - 1;
        Err(Error::Mismatch(Incompatible::new(
            format!("cannot read samples {first} to {last}"),
            format!("expected token ids below model.vocab = {}, found {invalid}", self.vocab),
            "raise model.vocab, or tokenize the corpus again with data.tokenizer",
        )))
    }
}

impl NodeShare {
    /// `None` if this rank reads alone, or the replicas of the node are not consecutive.
    fn new((peers, sample_bytes_max): (NodePeers, usize), mesh_rank: MeshRank) -> Option<Self> {
        let NodePeers { job, ranks } = peers;
        let rank =
            ranks.iter().position(|rank| *rank == mesh_rank.rank).filter(|_| ranks.len() > 1)?;
        let replicas: Vec<usize> =
            ranks.iter().map(|rank| mesh_rank.mesh.place(*rank).dp).collect();
        let first = *replicas.iter().min()?;
        let count = replicas.iter().max()? + 1 - first;
        let has_replica = |replica: usize| replicas.contains(&(first + replica));
        if !(0..count).all(has_replica) {
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

/// Divides samples into runs of steps of one size.
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

/// Cuts the rows of a step into micro-batches of `rows` rows.
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
