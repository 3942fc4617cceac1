//! State that each process has for itself, also after a fork.

use std::sync::OnceLock;

/// A fork of a fork, and so on. Python's workers are one or two.
const FORKS_MAX: usize = 8;

/// A value of this process, made at first use. A forked child makes its own: a lock that another
/// thread held at the moment of the fork stays locked in the child for ever, because that thread is
/// not there. What the parent made is neither used nor dropped.
pub(crate) struct PerProcess<T> {
    /// Of this process and those that it descends from, the oldest first.
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
        // Descendants beyond share the last.
        assert_eq!(*NUMBERS.of(99, || 0), FORKS_MAX as u32 * 10);
    }
}
