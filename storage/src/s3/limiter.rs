//! Limits the requests in flight: one more for every round of successes, half after a throttling
//! response. All stores of one bucket share it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, SemaphorePermit};

/// All requests in flight receive the same "slow down"; it counts once.
const CUT_PAUSE: Duration = Duration::from_secs(1);

/// Additive increase, multiplicative decrease.
#[derive(Debug)]
pub(crate) struct Limiter {
    permits: Semaphore,
    state: Mutex<LimiterState>,
    max: usize,
}

#[derive(Debug)]
struct LimiterState {
    /// The current limit, with fractions.
    limit: f64,
    /// Permits that exist, taken or not.
    existing: usize,
    cut: Option<Instant>,
}

/// The right to have one request in flight.
#[derive(Debug)]
pub(crate) struct Permit<'a> {
    limiter: &'a Limiter,
    permit: Option<SemaphorePermit<'a>>,
}

impl Limiter {
    pub(crate) fn new(max: usize) -> Self {
        let state = LimiterState { limit: max as f64, existing: max, cut: None };
        Limiter { permits: Semaphore::new(max), state: Mutex::new(state), max }
    }

    pub(crate) async fn acquire(&self) -> Permit<'_> {
        let permit = self.permits.acquire().await.expect("never closed");
        Permit { limiter: self, permit: Some(permit) }
    }

    /// The current limit.
    pub(crate) fn limit(&self) -> usize {
        self.state().limit as usize // fits: at most `max`
    }

    fn state(&self) -> MutexGuard<'_, LimiterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request succeeded.
    pub(crate) fn record_success(&self) {
        let mut state = self.state();
        state.limit = (state.limit + 1.0 / state.limit).min(self.max as f64);
        if state.existing < state.limit as usize {
            state.existing += 1;
            self.permits.add_permits(1);
        }
    }

    /// The server asked for fewer requests.
    pub(crate) fn slow_down(&self, now: Instant) {
        let mut state = self.state();
        if state.cut.is_none_or(|cut| now.duration_since(cut) >= CUT_PAUSE) {
            state.limit = (state.limit / 2.0).max(1.0);
            state.cut = Some(now);
        }
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut state = self.limiter.state();
        if state.existing > state.limit as usize {
            state.existing -= 1;
            if let Some(permit) = self.permit.take() {
                permit.forget();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_on_slow_down_and_grows_by_one_a_round() {
        let limiter = Limiter::new(16);
        let start = Instant::now();
        limiter.slow_down(start);
        limiter.slow_down(start);
        assert_eq!(limiter.limit(), 8, "one round of refusals counts once");
        limiter.slow_down(start + CUT_PAUSE);
        assert_eq!(limiter.limit(), 4);
        (0..5).for_each(|_| limiter.record_success());
        assert_eq!(limiter.limit(), 5);
        (0..1000).for_each(|_| limiter.record_success());
        assert_eq!(limiter.limit(), 16);
        for round in 2..20 {
            limiter.slow_down(start + CUT_PAUSE * round);
        }
        assert_eq!(limiter.limit(), 1, "one is always allowed");
    }

    #[test]
    fn permits_follow_the_limit() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let limiter = Limiter::new(4);
        let acquire = || runtime.block_on(limiter.acquire());
        let all: Vec<_> = (0..4).map(|_| acquire()).collect();
        assert_eq!(limiter.permits.available_permits(), 0);
        limiter.slow_down(Instant::now());
        drop(all);
        assert_eq!(limiter.permits.available_permits(), 2);
        (0..100).for_each(|_| limiter.record_success());
        assert_eq!(limiter.permits.available_permits(), 4);
    }
}
