//! A chart as SVG: lines over two axes, generated here so that a page has no dependencies.

use std::fmt::Write as _;

/// The maximum number of corners of a line: two for each pixel of the width below. More points are
/// drawn as means of equal runs of points, with a band from the minimum to the maximum of each.
const CORNERS_MAX: usize = 1000;

/// The size of the drawing in its own units; the page scales it.
const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 230.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = WIDTH - 18.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = HEIGHT - 36.0;

/// The scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scale {
    Linear,
    /// Linear, with 0 on it.
    FromZero,
    /// Logarithmic. Values that are not positive are not drawn.
    Log,
}

/// The contents of a chart.
#[derive(Debug)]
pub(super) struct Chart {
    pub(super) x_name: &'static str,
    pub(super) x_scale: Scale,
    pub(super) y_scale: Scale,
    /// Lines, each in the colour of its index.
    pub(super) lines: Vec<Vec<(f64, f64)>>,
    /// Single points, in the colour of their index.
    pub(super) dots: Vec<Vec<(f64, f64)>>,
    /// Marked values on the x axis, in the colour of their index.
    pub(super) marks: Vec<Vec<f64>>,
}

impl Chart {
    /// The drawing; `None` if there is nothing to draw.
    pub(super) fn svg(&self) -> Option<String> {
        let points = || self.lines.iter().chain(&self.dots).flatten().filter(|at| self.shows(at));
        let x = Axis::over(points().map(|at| at.0), self.x_scale, LEFT, RIGHT)?;
        let y = Axis::over(points().map(|at| at.1), self.y_scale, BOTTOM, TOP)?;
        let mut svg = format!(
            "<svg class=\"chart\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" {} {}>\n",
            x.attributes("x"),
            y.attributes("y")
        );
        self.axes(&mut svg, &x, &y);
        for (place, marks) in self.marks.iter().enumerate() {
            for at in marks.iter().filter(|at| x.has(**at)) {
                let at = x.place(*at);
                _ = writeln!(
                    svg,
                    "<line class=\"mark s{place}\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" \
                     y2=\"{BOTTOM}\"/>"
                );
            }
        }
        for (place, line) in self.lines.iter().enumerate() {
            let shown: Vec<_> = line.iter().filter(|at| self.shows(at)).copied().collect();
            draw_line(&mut svg, place, &shown, &x, &y);
        }
        for (place, dots) in self.dots.iter().enumerate() {
            for at in dots.iter().filter(|at| self.shows(at)) {
                let (x, y) = (x.place(at.0), y.place(at.1));
                _ = writeln!(
                    svg,
                    "<circle class=\"dot s{place}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.6\"/>"
                );
            }
        }
        svg.push_str("</svg>\n");
        Some(svg)
    }

    fn shows(&self, (x, y): &(f64, f64)) -> bool {
        let shows = |value: f64, scale| value.is_finite() && (scale != Scale::Log || value > 0.0);
        shows(*x, self.x_scale) && shows(*y, self.y_scale)
    }

    fn axes(&self, svg: &mut String, x: &Axis, y: &Axis) {
        for (at, text) in y.ticks(5) {
            let at = y.place(at);
            let text_y = at + 3.5;
            _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
                 <text class=\"tick\" x=\"{}\" y=\"{text_y:.1}\" text-anchor=\"end\">{text}</text>",
                LEFT - 6.0
            );
        }
        for (at, text) in x.ticks(6) {
            let at = x.place(at);
            _ = writeln!(
                svg,
                "<text class=\"tick\" x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{text}</text>",
                BOTTOM + 14.0
            );
        }
        _ = writeln!(
            svg,
            "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{BOTTOM}\" y2=\"{BOTTOM}\"/>\
             <text class=\"tick\" x=\"{RIGHT}\" y=\"{}\" text-anchor=\"end\">{}</text>",
            HEIGHT - 6.0,
            self.x_name
        );
    }
}

/// Draws a line and, if it is drawn as means, its band.
fn draw_line(svg: &mut String, place: usize, points: &[(f64, f64)], x: &Axis, y: &Axis) {
    let each = points.len().div_ceil(CORNERS_MAX).max(1);
    let (mut line, mut upper, mut lower) = (String::new(), String::new(), Vec::new());
    for run in points.chunks(each) {
        let mean = |of: fn(&(f64, f64)) -> f64| run.iter().map(of).sum::<f64>() / run.len() as f64;
        let at = x.place(mean(|at| at.0));
        let ys = || run.iter().map(|at| at.1);
        _ = write!(line, "{at:.2},{:.2} ", y.place(mean(|at| at.1)));
        _ = write!(upper, "{at:.2},{:.2} ", y.place(ys().fold(f64::NEG_INFINITY, f64::max)));
        lower.push(format!("{at:.2},{:.2}", y.place(ys().fold(f64::INFINITY, f64::min))));
    }
    if each > 1 {
        lower.reverse();
        let lower = lower.join(" ");
        _ = writeln!(svg, "<polygon class=\"band s{place}\" points=\"{upper}{lower}\"/>");
    }
    if !line.is_empty() {
        let line = line.trim_end();
        _ = writeln!(svg, "<polyline class=\"line s{place}\" points=\"{line}\"/>");
    }
}

/// An axis: maps values to positions.
#[derive(Clone, Copy, Debug)]
struct Axis {
    scale: Scale,
    /// Values at both ends; of a logarithmic axis their logarithms.
    low: f64,
    high: f64,
    /// The positions of both in the drawing.
    from: f64,
    to: f64,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>, scale: Scale, from: f64, to: f64) -> Option<Self> {
        let values = values.map(|value| if scale == Scale::Log { value.log10() } else { value });
        let ends = |(low, high): (f64, f64), value: f64| (low.min(value), high.max(value));
        let (mut low, mut high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), ends);
        if low > high {
            return None;
        }
        if scale == Scale::FromZero {
            (low, high) = (low.min(0.0), high.max(0.0));
        }
        if low == high {
            let room = if low == 0.0 { 1.0 } else { low.abs() * 0.1 };
            (low, high) = (low - room, high + room);
        }
        // The difference of the ends of the widest range would be infinite.
        let most = f64::MAX / 4.0;
        Some(Axis { scale, low: low.max(-most), high: high.min(most), from, to })
    }

    fn value(&self, value: f64) -> f64 {
        if self.scale == Scale::Log { value.log10() } else { value }
    }

    fn has(&self, value: f64) -> bool {
        (self.low..=self.high).contains(&self.value(value))
    }

    fn place(&self, value: f64) -> f64 {
        let part = (self.value(value) - self.low) / (self.high - self.low);
        self.from + (self.to - self.from) * part
    }

    /// Attributes with which the page's script converts a position to a value.
    fn attributes(&self, name: &str) -> String {
        let log = u8::from(self.scale == Scale::Log);
        format!("data-{name}=\"{:e} {:e} {} {} {log}\"", self.low, self.high, self.from, self.to)
    }

    /// About `count` round values, and their labels.
    fn ticks(&self, count: usize) -> Vec<(f64, String)> {
        if self.scale == Scale::Log && self.high - self.low >= 1.0 {
            // fits: logarithms of floats are below 400.
            let powers = self.low.ceil() as i32..=self.high.floor() as i32;
            let every = (powers.clone().count() / (count + 1)).max(1);
            return powers.step_by(every).map(|n| (10_f64.powi(n), format!("1e{n}"))).collect();
        }
        let (low, high) = match self.scale {
            Scale::Log => (10_f64.powf(self.low), 10_f64.powf(self.high)),
            _ => (self.low, self.high),
        };
        let rough = (high - low) / count as f64;
        let power = 10_f64.powf(rough.log10().floor());
        let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
        let step = steps.into_iter().find(|step| *step >= rough).unwrap_or(rough);
        let first = (low / step).ceil();
        // A step below the precision of the values would repeat the same tick, so bound the count.
        let ticks = (0..=2 * count).map(|n| (first + n as f64) * step);
        let ticks = ticks.take_while(|tick| *tick <= high + step * 1e-9);
        ticks.map(|tick| (tick, number(tick, step))).collect()
    }
}

/// The label of a value, with the digits that a step needs.
fn number(value: f64, step: f64) -> String {
    if value.abs() < step * 1e-6 {
        return "0".to_owned();
    }
    let top = value.abs().max(step);
    if !(1e-3..1e7).contains(&step) {
        let digits = (top.log10().floor() - step.log10().floor()).clamp(0.0, 6.0) as usize;
        return format!("{value:.digits$e}");
    }
    for (unit, name) in [(1e6, "M"), (1e3, "k")] {
        if top >= unit && step >= unit / 100.0 {
            return trimmed(value / unit, step / unit) + name;
        }
    }
    trimmed(value, step)
}

fn trimmed(value: f64, step: f64) -> String {
    let digits = (-step.log10().floor()).clamp(0.0, 6.0) as usize;
    format!("{value:.digits$}")
}
