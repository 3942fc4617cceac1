use super::RunRecord;

/// The result of a range test of the learning rate.
#[derive(Clone, Debug, PartialEq)]
pub struct Sweep {
    /// Rates, rising, and their losses, each the mean over a twentieth of the test.
    pub points: Vec<(f64, f64)>,
    /// The rate at which the loss falls fastest, up to `least`.
    pub fastest: f64,
    /// The rate of the lowest loss.
    pub least: f64,
}

impl Sweep {
    /// Evaluates the log of a run with rising rates; `None` if it is too short.
    #[must_use]
    pub fn of(run: &RunRecord) -> Option<Self> {
        let steps: Vec<(f64, f64)> =
            run.steps.iter().filter_map(|line| Some((line.lr?, line.loss?))).collect();
        let side = (steps.len() / 40).max(1);
        let mean = |at: usize| {
            let near = &steps[at.saturating_sub(side)..steps.len().min(at + side + 1)];
            (steps[at].0, near.iter().map(|step| step.1).sum::<f64>() / near.len() as f64)
        };
        let points: Vec<(f64, f64)> = (0..steps.len()).map(mean).collect();
        let by_loss = |a: &usize, b: &usize| points[*a].1.total_cmp(&points[*b].1);
        let least = (0..points.len()).min_by(by_loss)?;
        let fall = |at: &usize| points[at + side].1 - points[at - side].1;
        let inner = side..(least + 1).min(points.len().saturating_sub(side));
        let fastest = inner.min_by(|a, b| fall(a).total_cmp(&fall(b)))?;
        Some(Sweep { fastest: points[fastest].0, least: points[least].0, points })
    }
}
