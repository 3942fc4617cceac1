//! After the first window nothing is allocated: rounds, buffers and batches are reused.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use indexed::{Builder, Dtype, IndexedDataset};
use loader::batch::{GptAssemble, GptConfig};
use loader::{DataFile, Loader, LoaderOptions, PieceRef, SampleOrder};
use storage::Key;

struct Counting;

static COUNT: AtomicU64 = AtomicU64::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: all is the system's allocator's; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Relaxed);
        // SAFETY: the caller's promise, handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(start, layout) }
    }
}

const SEQ_LEN: u64 = 256;
const SAMPLES: u64 = 40_000;
const WINDOW_BYTES: u64 = 1 << 20;

/// Samples of two pieces anywhere in a file.
#[derive(Debug)]
struct Scattered([DataFile; 1]);

impl SampleOrder for Scattered {
    fn sources(&self) -> &[DataFile] {
        &self.0
    }

    fn sample_count(&self) -> u64 {
        SAMPLES
    }

    fn pieces(&self, sample: u64, into: &mut Vec<PieceRef>) -> loader::Result<()> {
        let places = (self.0[0].len_bytes - 2 * SEQ_LEN) / 2;
        for (salt, tokens) in [(40_503, 100), (10_007, SEQ_LEN + 1 - 100)] {
            let offset_bytes = sample.wrapping_mul(salt) % places * 2;
            into.push(PieceRef { file: 0, offset_bytes, len_bytes: tokens * 2 });
        }
        Ok(())
    }

    fn name(&self) -> String {
        "scattered".to_owned()
    }
}

#[test]
fn no_allocations_after_the_first_window() {
    let folder = tempfile::tempdir().unwrap();
    let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
    let key = Key::new("corpus").unwrap();
    let mut builder = Builder::create(&store, &key, Dtype::U16).unwrap();
    let tokens: Vec<u32> = (0..1_000_000).map(|at| at % 60_000).collect();
    builder.add_sequence(&tokens).unwrap();
    builder.end_document().unwrap();
    builder.finish().unwrap();
    let dataset = IndexedDataset::open(&store, &key).unwrap();
    let order = Arc::new(Scattered([DataFile::bin_of(&dataset).unwrap()]));
    let mut options = LoaderOptions::new(8, 0..SAMPLES);
    options.window_bytes = WINDOW_BYTES;
    let assemble = GptAssemble::new(GptConfig::new(SEQ_LEN as usize), vec![Dtype::U16]).unwrap();
    let mut loader = Loader::start(order, assemble, options).unwrap();
    // Wait until the window is full, however slow the threads are.
    let until = Instant::now() + Duration::from_secs(60);
    while loader.metrics().ahead_bytes < WINDOW_BYTES / 8 * 7 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut take = |batches: u64| {
        for _ in 0..batches {
            let batch = loader.next_batch().unwrap().unwrap();
            loader.recycle(batch);
        }
        COUNT.load(Relaxed)
    };
    let batches = SAMPLES / 8;
    let before = take(batches / 2);
    let after = take(batches / 2 - 100);
    // Tables of the store may still grow once, when more is in flight than ever before.
    let allowed = 16;
    assert!(after - before <= allowed, "{} in {} batches", after - before, batches / 2 - 100);
}
