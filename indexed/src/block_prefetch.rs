//! Generates numbers in blocks on another thread while this thread uses the block before.

use std::ops::ControlFlow;
use std::sync::mpsc::{channel, sync_channel};
use std::thread;

/// Numbers of a block: 256 KiB, which fit the L2 cache of a core.
pub(crate) const BLOCK: usize = 1 << 16;

/// Fewer blocks take less time than starting a thread.
const BLOCKS_MIN: usize = 8;

/// Blocks in the queue, at most.
const AHEAD: usize = 4;

/// Calls `take` with each block of numbers that `make` appends, in order and on this thread, until
/// it breaks. With many blocks, `make` runs on another thread, some blocks ahead.
pub(crate) fn generate_in_blocks(
    blocks: usize,
    mut make: impl FnMut(usize, &mut Vec<u32>) + Send,
    mut take: impl FnMut(usize, &[u32]) -> ControlFlow<()>,
) {
    if blocks >= BLOCKS_MIN && with_thread(blocks, &mut make, &mut take) {
        return;
    }
    let mut numbers = Vec::with_capacity(BLOCK);
    for block in 0..blocks {
        numbers.clear();
        make(block, &mut numbers);
        if take(block, &numbers).is_break() {
            return;
        }
    }
}

/// False if no thread could be started; then nothing was done.
fn with_thread(
    blocks: usize,
    make: &mut (impl FnMut(usize, &mut Vec<u32>) + Send),
    take: &mut impl FnMut(usize, &[u32]) -> ControlFlow<()>,
) -> bool {
    thread::scope(|scope| {
        let (filled_sender, filled) = sync_channel::<Vec<u32>>(AHEAD);
        let (recycled_sender, recycled) = channel::<Vec<u32>>();
        let producer = move || {
            for block in 0..blocks {
                let mut numbers = recycled.try_recv().unwrap_or_default();
                numbers.clear();
                make(block, &mut numbers);
                // The receiver may have stopped early.
                if filled_sender.send(numbers).is_err() {
                    return;
                }
            }
        };
        if thread::Builder::new().name("index".to_owned()).spawn_scoped(scope, producer).is_err() {
            return false;
        }
        for (block, numbers) in filled.into_iter().enumerate() {
            if take(block, &numbers).is_break() {
                break;
            }
            _ = recycled_sender.send(numbers);
        }
        true
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_in_order_with_and_without_a_thread() {
        for (blocks, stop) in [(0, 9), (3, 9), (100, 200), (100, 5)] {
            let mut seen = Vec::new();
            let make = |block, numbers: &mut Vec<u32>| numbers.extend([block as u32, 7]);
            generate_in_blocks(blocks, make, |block, numbers| {
                assert_eq!(numbers, [block as u32, 7]);
                seen.push(block);
                if block == stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            assert_eq!(seen, Vec::from_iter(0..blocks.min(stop + 1)));
        }
    }
}
