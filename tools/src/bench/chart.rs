//! Charts as inline SVG, so that a report page needs no other files.

use std::fmt::Write as _;

use super::measure::stats::Estimate;
use super::report::short;

/// Size of the drawing in SVG units; the page scales it.
const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 230.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = WIDTH - 18.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = HEIGHT - 36.0;

/// Height of a row of the bar chart.
const BAR: f64 = 26.0;

/// Most points of a line: two for each pixel of the width.
const CORNERS_MAX: usize = 1000;

/// Bars from 0 with their intervals; the first item of a pair selects the colour.
#[must_use]
pub fn bars(values: &[(usize, Estimate)], unit: &str) -> String {
    let height = BAR * values.len() as f64 + 30.0;
    let most = values.iter().map(|(_, of)| of.high.max(of.median)).fold(1e-12, f64::max);
    let x = Axis { low: 0.0, high: most, is_log: false, from: 18.0, to: RIGHT - 60.0 };
    let mut svg = begin(height);
    for (row, (place, of)) in values.iter().enumerate() {
        let top = 6.0 + BAR * row as f64;
        let (middle, end) = (top + BAR / 2.0 - 2.0, x.place(of.median));
        _ = writeln!(
            svg,
            "<rect class=\"bar s{place}\" x=\"18\" y=\"{top:.1}\" width=\"{:.1}\" \
             height=\"{:.1}\"/>",
            end - 18.0,
            BAR - 6.0
        );
        let (low, high) = (x.place(of.low), x.place(of.high));
        let (above, below) = (middle - 5.0, middle + 5.0);
        _ = writeln!(
            svg,
            "<path class=\"span\" d=\"M{low:.1} {above:.1}V{below:.1}M{low:.1} {middle:.1}\
             H{high:.1}M{high:.1} {above:.1}V{below:.1}\"/>\
             <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\">{} {unit}</text>",
            high.max(end) + 6.0,
            middle + 4.0,
            short(of.median)
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// A line chart.
#[derive(Debug)]
pub struct Lines<'a> {
    /// Label of the x axis.
    pub x_name: &'a str,
    /// Whether the x axis is logarithmic. Points with x <= 0 are then not drawn.
    pub x_log: bool,
    /// The lines; the first item of a pair selects the colour.
    pub lines: Vec<(usize, &'a [(f64, f64)])>,
}

impl Lines<'_> {
    /// The drawing; `None` if there is nothing to draw.
    #[must_use]
    pub fn svg(&self) -> Option<String> {
        let shows =
            |at: &&(f64, f64)| at.0.is_finite() && at.1.is_finite() && (!self.x_log || at.0 > 0.0);
        let points = || self.lines.iter().flat_map(|(_, line)| line.iter()).filter(shows);
        let x = Axis::over(points().map(|at| at.0), self.x_log, LEFT, RIGHT)?;
        let y = Axis::over(points().map(|at| at.1).chain([0.0]), false, BOTTOM, TOP)?;
        let mut svg = begin(HEIGHT);
        self.axes(&mut svg, &x, &y);
        for (place, line) in &self.lines {
            let shown: Vec<_> = line.iter().filter(shows).collect();
            let each = shown.len().div_ceil(CORNERS_MAX).max(1);
            let corner = |at: &&(f64, f64)| format!("{:.1},{:.1}", x.place(at.0), y.place(at.1));
            let corners: Vec<String> = shown.iter().step_by(each).map(corner).collect();
            if !corners.is_empty() {
                let corners = corners.join(" ");
                _ = writeln!(svg, "<polyline class=\"line s{place}\" points=\"{corners}\"/>");
            }
        }
        svg.push_str("</svg>\n");
        Some(svg)
    }

    fn axes(&self, svg: &mut String, x: &Axis, y: &Axis) {
        for at in y.ticks(5) {
            let (place, text) = (y.place(at), round_text(at));
            _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{place:.1}\" \
                 y2=\"{place:.1}\"/><text class=\"tick\" x=\"{}\" y=\"{:.1}\" \
                 text-anchor=\"end\">{text}</text>",
                LEFT - 6.0,
                place + 3.5
            );
        }
        for at in x.ticks(6) {
            let (place, text, under) = (x.place(at), round_text(at), BOTTOM + 14.0);
            _ = writeln!(
                svg,
                "<text class=\"tick\" x=\"{place:.1}\" y=\"{under}\" \
                 text-anchor=\"middle\">{text}</text>"
            );
        }
        let (under, name) = (HEIGHT - 6.0, self.x_name);
        _ = writeln!(
            svg,
            "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{BOTTOM}\" y2=\"{BOTTOM}\"/>\
             <text class=\"tick\" x=\"{RIGHT}\" y=\"{under}\" text-anchor=\"end\">{name}</text>"
        );
    }
}

/// Text of a round value, without trailing zeros.
fn round_text(value: f64) -> String {
    if value.abs() >= 1e4 {
        return short(value);
    }
    let text = format!("{value:.6}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "0" && value != 0.0 { format!("{value:e}") } else { text.to_owned() }
}

fn begin(height: f64) -> String {
    format!("<svg class=\"chart\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n")
}

/// Maps values to positions in the drawing.
struct Axis {
    low: f64,
    high: f64,
    is_log: bool,
    from: f64,
    to: f64,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>, is_log: bool, from: f64, to: f64) -> Option<Self> {
        let ends = |(low, high): (f64, f64), value: f64| (low.min(value), high.max(value));
        let (mut low, mut high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), ends);
        if low > high {
            return None;
        }
        if low == high {
            high = low + low.abs().max(1e-9);
        }
        if is_log {
            (low, high) = (low.log10().floor(), high.log10().ceil());
        }
        Some(Axis { low, high, is_log, from, to })
    }

    fn place(&self, value: f64) -> f64 {
        let value = if self.is_log { value.log10() } else { value };
        let part = (value - self.low) / (self.high - self.low);
        self.from + (self.to - self.from) * part
    }

    /// About `count` round values.
    fn ticks(&self, count: usize) -> Vec<f64> {
        if self.is_log {
            // fits: logarithms of times are small
            return (self.low as i32..=self.high as i32).map(|n| 10_f64.powi(n)).collect();
        }
        let rough = (self.high - self.low) / count as f64;
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
        let step = step.into_iter().find(|step| *step >= rough).unwrap_or(rough);
        let first = (self.low / step).ceil();
        let ticks = (0..=2 * count).map(|nth| (first + nth as f64) * step);
        ticks.take_while(|tick| *tick <= self.high + step * 1e-9).collect()
    }
}
