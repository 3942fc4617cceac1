//! State that each process has of its own, also after a fork.

use std::sync::OnceLock;

/// Generations of forks; Python's workers are the first or second.
const FORKS_MAX: usize = 8;

/// A value of this process, made at first use. A forked child makes its own: a lock that another
/// thread held at the moment of the fork stays locked in the child for ever, because that thread
/// does not exist there. The value of the parent is neither used nor dropped.
pub(crate) struct PerProcess<T> {
    /// Values of this process and its ancestors, the oldest first.
    slots: [OnceLock<(u32, T)>; FORKS_MAX],
}

impl<T> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        PerProcess { slots: [const { OnceLock::new() }; FORKS_MAX] }
    }

    pub(crate) fn get(&self, make: impl Fn() -> T) -> &T {
        self.of(std::process::id(), make)
    }

    fn of(&self, process: u32, make: impl Fn() -> T) -> &T {
        let mut slots = self.slots.iter();
        loop {
            let slot = slots.next().expect("the last slot is returned below");
            let (owner, value) = slot.get_or_init(|| (process, make()));
            if *owner == process || slots.len() == 0 {
                return value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_process_has_its_own() {
        static NUMBERS: PerProcess<u32> = PerProcess::new();
        for process in 1..=FORKS_MAX as u32 {
            assert_eq!(*NUMBERS.of(process, || process * 10), process * 10);
            assert_eq!(*NUMBERS.of(process, || 0), process * 10);
        }
        assert_eq!(*NUMBERS.of(1, || 0), 10);
        // Further descendants share the last slot.
        assert_eq!(*NUMBERS.of(99, || 0), FORKS_MAX as u32 * 10);
    }
}
