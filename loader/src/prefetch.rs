use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;

use indexed::{GptIndex, IndexedDataset};
use storage::Read;

use crate::plan::Plan;
use crate::{Batch, Error, Result};

/// What a loader is to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Tokens a row. Minimum: 1. The index must have been built for the same length.
    pub seq_len: usize,
    /// Rows a batch. Minimum: 1.
    pub micro_batch: usize,
    /// The first sample to deliver: what a checkpoint remembers.
    pub samples_consumed: u64,
    /// One past the last sample to deliver.
    pub samples_end: u64,
    /// Batches read ahead of the one that is being consumed. Minimum: 1. Each costs
    /// `micro_batch * seq_len * 20` bytes (two i64 and one f32 a token).
    pub window_batches: usize,
}

/// Batches of a GPT corpus in the shuffled order, read ahead of their use.
///
/// One thread plans, reads and decodes; at most [`Options::window_batches`] finished batches wait
/// in a queue, and one round of reads is under way. Dropping the loader ends the thread.
#[derive(Debug)]
pub struct GptBatches {
    batches: Option<Receiver<Result<Batch>>>,
    spent: Sender<Batch>,
    reader: Option<JoinHandle<()>>,
    samples_consumed: u64,
    samples_end: u64,
}

/// Batches whose reads are handed to the store together. Eight micro-batches of eight samples of
/// two or three parts are some 150 reads, more than the 64 that a device keeps in flight.
const ROUND_BATCHES_MAX: usize = 8;

impl GptBatches {
    /// Starts reading at `options.samples_consumed`.
    ///
    /// # Errors
    /// [`Error::Option`] for a size of zero, [`Error::TooFewSamples`] if the index ends too soon.
    pub fn start(
        dataset: Arc<IndexedDataset>,
        index: Arc<GptIndex>,
        options: Options,
    ) -> Result<Self> {
        check(&dataset, &index, &options)?;
        let (to_consumer, batches) = sync_channel(options.window_batches);
        let (spent, recycled) = channel();
        let Options { samples_consumed, samples_end, .. } = options;
        let reader = Reader { dataset, index, options, recycled, to_consumer };
        let reader = std::thread::Builder::new()
            .name("loader".to_owned())
            .spawn(move || reader.run())
            .map_err(|e| storage::Error::from_io("start a thread for", "the loader", e))?;
        let reader = Some(reader);
        Ok(GptBatches { batches: Some(batches), spent, reader, samples_consumed, samples_end })
    }

    /// The next batch in order, or `None` after the last. Waits if it has not been read yet.
    ///
    /// # Errors
    /// What the store said of the first read that failed. The loader is then at its end.
    pub fn next_batch(&mut self) -> Result<Option<Batch>> {
        if self.samples_consumed >= self.samples_end {
            return Ok(None);
        }
        let batches = self.batches.as_ref().expect("taken only by drop");
        let batch = batches.recv().map_err(|_| Error::Gone)??;
        self.samples_consumed += batch.rows as u64;
        Ok(Some(batch))
    }

    /// Gives a batch's memory back, to be filled again. After the first window nothing is
    /// allocated.
    pub fn recycle(&self, batch: Batch) {
        // A reader that has ended needs no memory: nothing is lost with it.
        let _ = self.spent.send(batch);
    }

    /// Samples delivered by now, those before the start counted in: all that there is to remember.
    #[must_use]
    pub fn samples_consumed(&self) -> u64 {
        self.samples_consumed
    }
}

impl Drop for GptBatches {
    fn drop(&mut self) {
        // The reader's next send fails, and it ends.
        self.batches = None;
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

fn check(dataset: &IndexedDataset, index: &GptIndex, options: &Options) -> Result<()> {
    let sizes = [
        ("seq_len", options.seq_len),
        ("micro_batch", options.micro_batch),
        ("window_batches", options.window_batches),
    ];
    for (name, got) in sizes {
        if got == 0 {
            return Err(Error::Option { name, got: 0, due: "at least 1" });
        }
    }
    if options.samples_consumed > options.samples_end {
        let got = options.samples_consumed;
        return Err(Error::Option { name: "samples_consumed", got, due: "at most samples_end" });
    }
    let got = index.sample_count();
    if options.samples_end > got {
        return Err(Error::TooFewSamples {
            dataset: dataset.display(),
            due: options.samples_end,
            got,
        });
    }
    Ok(())
}

struct Reader {
    dataset: Arc<IndexedDataset>,
    index: Arc<GptIndex>,
    options: Options,
    recycled: Receiver<Batch>,
    to_consumer: SyncSender<Result<Batch>>,
}

impl Reader {
    /// Reads round after round until all is delivered, a read fails or nobody listens any more.
    fn run(self) {
        let round_batches = (self.options.window_batches / 2).clamp(1, ROUND_BATCHES_MAX);
        let round_samples = (round_batches * self.options.micro_batch) as u64;
        let (mut plan, mut bytes, mut text) = (Plan::default(), Vec::new(), Vec::new());
        let mut first = self.options.samples_consumed;
        while first < self.options.samples_end {
            let end = (first + round_samples).min(self.options.samples_end);
            if let Err(error) = self.fetch(first..end, &mut plan, &mut bytes) {
                let _ = self.to_consumer.send(Err(error));
                return;
            }
            if self.deliver(first..end, &plan, &bytes, &mut text).is_err() {
                return;
            }
            first = end;
        }
    }

    fn fetch(
        &self,
        samples: std::ops::Range<u64>,
        plan: &mut Plan,
        bytes: &mut Vec<u8>,
    ) -> Result<()> {
        let tokens_max = self.options.seq_len as u64 + 1;
        plan.fill(&self.dataset, &self.index, samples, tokens_max)?;
        // fits: a round holds a few dozen samples, and each fits in memory
        bytes.resize(plan.buffer_bytes() as usize, 0);
        let mut rest = bytes.as_mut_slice();
        let mut reads = Vec::with_capacity(plan.extents.len());
        for extent in &plan.extents {
            let (buf, after) = rest.split_at_mut(extent.len_bytes as usize);
            reads.push(Read { offset: extent.offset_bytes, buf });
            rest = after;
        }
        Ok(self.dataset.bin().read_many(&mut reads)?)
    }

    /// Hands the samples of a round over as batches; an error means that nobody listens.
    fn deliver(
        &self,
        samples: std::ops::Range<u64>,
        plan: &Plan,
        bytes: &[u8],
        text: &mut Vec<i64>,
    ) -> std::result::Result<(), ()> {
        let dtype = self.dataset.dtype();
        let mut first = samples.start;
        while first < samples.end {
            let rows = (samples.end - first).min(self.options.micro_batch as u64) as usize;
            let mut batch = self.recycled.try_recv().unwrap_or_default();
            batch.reset(first, rows, self.options.seq_len);
            for row in 0..rows {
                text.clear();
                for piece in plan.sample((first - samples.start) as usize + row) {
                    let start = piece.place_bytes as usize;
                    let encoded = &bytes[start..start + piece.len_bytes as usize];
                    let at = text.len();
                    text.resize(at + encoded.len() / dtype.item_bytes() as usize, 0);
                    dtype.decode_i64(encoded, &mut text[at..]);
                }
                batch.set_row(row, text);
            }
            first += rows as u64;
            self.to_consumer.send(Ok(batch)).map_err(|_| ())?;
        }
        Ok(())
    }
}
