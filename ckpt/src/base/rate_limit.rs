use std::num::NonZeroU64;
use std::time::Duration;

/// Longest backlog that is made up: short pauses of the source do not reduce the rate, and the
/// store never gets more than this much at once.
const BURST: Duration = Duration::from_millis(250);

/// Limits the rate of bytes. It has no clock; the caller passes the time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RateLimiter {
    bytes_per_s: NonZeroU64,
    /// The time at which all bytes sent so far are paid for.
    paid_at: Duration,
}

impl RateLimiter {
    pub(crate) fn new(bytes_per_s: NonZeroU64) -> Self {
        RateLimiter { bytes_per_s, paid_at: Duration::ZERO }
    }

    /// Pays for `bytes`, and returns how long to wait before they are sent.
    pub(crate) fn pay(&mut self, now: Duration, bytes: u64) -> Duration {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_s.get());
        let cost = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        self.paid_at = self.paid_at.max(now.saturating_sub(BURST)).saturating_add(cost);
        self.paid_at.saturating_sub(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For any sizes and pauses, no window of time sees more than the rate and one burst.
    #[test]
    fn rate_is_not_exceeded() {
        let rate = 1_000_000;
        let mut limiter = RateLimiter::new(NonZeroU64::new(rate).unwrap());
        let mut now = Duration::ZERO;
        let mut sent: Vec<(Duration, u64)> = Vec::new();
        let mut seed = 7_u64;
        for _ in 0..2000 {
            seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            let bytes = (seed >> 33) % 5000;
            now += limiter.pay(now, bytes);
            sent.push((now, bytes));
            if (seed >> 20).is_multiple_of(50) {
                now += Duration::from_millis((seed >> 40) % 400);
            }
        }
        for from in (0..sent.len()).step_by(37) {
            let mut total = 0;
            for &(at, bytes) in &sent[from..] {
                total += bytes;
                let allowed = rate as f64 * (at - sent[from].0 + BURST).as_secs_f64();
                assert!(total as f64 <= allowed + 5001.0, "{total} bytes, {allowed} allowed");
            }
        }
    }

    /// Without pauses of the source, the full rate is reached.
    #[test]
    fn full_rate_is_reached() {
        let mut limiter = RateLimiter::new(NonZeroU64::new(1_000_000).unwrap());
        let mut now = Duration::from_secs(3);
        for _ in 0..1000 {
            now += limiter.pay(now, 4000);
        }
        let expected = Duration::from_secs(7);
        assert_eq!(now + BURST, expected);
    }

    #[test]
    fn extreme_values_do_not_overflow() {
        let mut limiter = RateLimiter::new(NonZeroU64::MIN);
        let (begin, later) = (Duration::ZERO, Duration::from_secs(5));
        let long = Duration::from_secs(1 << 32);
        assert!(limiter.pay(begin, u64::MAX) > long);
        assert!(!limiter.pay(later, u64::MAX).is_zero());
    }
}
