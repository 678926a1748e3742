//! A figure as SVG: lines over a logarithmic axis, the paper's points as rings.

use std::fmt::Write as _;

use super::report::Report;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 34.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 56.0;
const LEGEND_ROW: f64 = 18.0;
const COLOURS: [&str; 6] = ["#c0392b", "#2e6da4", "#3b8f4a", "#8e5aa8", "#c98a1b", "#555555"];

/// Where values lie on the picture.
struct Frame {
    x: (f64, f64),
    y: (f64, f64),
}

impl Frame {
    fn x(&self, value: u32) -> f64 {
        let share = (f64::from(value).max(1.0).ln() - self.x.0) / (self.x.1 - self.x.0);
        LEFT + share * (WIDTH - LEFT - RIGHT)
    }
    fn y(&self, value: f64) -> f64 {
        let share = (value - self.y.0) / (self.y.1 - self.y.0);
        HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
    }
}

/// The picture of `report`; from 0 up, or from about its least value.
pub(super) fn draw(report: &Report, zero_based: bool) -> String {
    let mut names: Vec<&str> = report.rows.iter().map(|row| row.series.as_str()).collect();
    names.dedup();
    let frame = frame(report, zero_based);
    let mut body = String::new();
    axes(&mut body, report, &frame);
    for (number, name) in names.iter().enumerate() {
        line(&mut body, report, &frame, name, COLOURS[number % COLOURS.len()], number);
    }
    let height = HEIGHT + LEGEND_ROW * (names.len() as f64 + 1.0);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{body}</svg>\n"
    )
}

fn frame(report: &Report, zero_based: bool) -> Frame {
    let xs = report.rows.iter().map(|row| f64::from(row.x).max(1.0).ln());
    let (low, high) = xs.fold((f64::MAX, f64::MIN), |(low, high), x| (low.min(x), high.max(x)));
    let ys = report.rows.iter().flat_map(|row| [Some(row.here), row.paper]).flatten();
    let (least, most) = ys.fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), y| (low.min(y), high.max(y)));
    let least = if zero_based { 0.0 } else { (least * 0.9).floor().max(0.0) };
    Frame { x: (low, high.max(low + 1e-9)), y: (least, most * 1.08) }
}

fn axes(body: &mut String, report: &Report, frame: &Frame) {
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    let _ = writeln!(
        body,
        "<text x=\"{LEFT}\" y=\"22\" font-size=\"15\" font-weight=\"bold\">{}</text>\n\
         <path d=\"M{LEFT} {TOP}V{bottom}H{right}\" fill=\"none\" stroke=\"#333333\"/>",
        escape(&report.title)
    );
    let step = round_step((frame.y.1 - frame.y.0) / 5.0);
    let (first, last) = ((frame.y.0 / step).ceil() as i64, (frame.y.1 / step).floor() as i64);
    for number in first..=last {
        let value = number as f64 * step;
        let y = frame.y(value);
        let _ = writeln!(
            body,
            "<path d=\"M{LEFT} {y:.1}H{right}\" stroke=\"#e4e4e4\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 6.0,
            y + 4.0,
            tick(value, step)
        );
    }
    let mut values: Vec<u32> = report.rows.iter().map(|row| row.x).collect();
    values.sort_unstable();
    values.dedup();
    let mut free_from = f64::MIN;
    for value in values {
        let x = frame.x(value);
        let _ = writeln!(body, "<path d=\"M{x:.1} {bottom}v5\" stroke=\"#333333\"/>");
        if x > free_from {
            let _ = writeln!(
                body,
                "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{value}</text>",
                bottom + 19.0
            );
            free_from = x + 44.0;
        }
    }
    let _ = writeln!(
        body,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n\
         <text transform=\"translate(16 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        (LEFT + right) / 2.0,
        bottom + 40.0,
        escape(&report.x),
        (TOP + bottom) / 2.0,
        escape(&report.y),
    );
}

/// 1, 2 or 5 times a power of ten, not less than `least`.
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.max(1e-9).log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .map(|factor| factor * power)
        .into_iter()
        .find(|step| *step >= least)
        .unwrap_or(power)
}

/// A value on the axis, with as many digits as its step needs.
fn tick(value: f64, step: f64) -> String {
    let digits = (-step.log10().floor()).max(0.0) as usize;
    format!("{value:.digits$}")
}

fn line(body: &mut String, report: &Report, frame: &Frame, name: &str, colour: &str, number: usize) {
    let rows = || report.rows.iter().filter(|row| row.series == name);
    // what lies upon another line lets it show through, and rings about the same point have different sizes
    let dash = ["", " stroke-dasharray=\"9 5\"", " stroke-dasharray=\"3 4\""][number % 3];
    let radius = 5.0 + 2.0 * number as f64;
    let points: Vec<String> =
        rows().map(|row| format!("{:.1},{:.1}", frame.x(row.x), frame.y(row.here))).collect();
    let _ = writeln!(
        body,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>",
        points.join(" ")
    );
    for row in rows() {
        let (x, y) = (frame.x(row.x), frame.y(row.here));
        let _ = writeln!(body, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\" fill=\"{colour}\"/>");
        if let Some(paper) = row.paper {
            let y = frame.y(paper);
            let _ = writeln!(
                body,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>"
            );
        }
    }
    let y = HEIGHT + LEGEND_ROW * number as f64;
    let _ = writeln!(
        body,
        "<path d=\"M{LEFT} {y}h24\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/><text x=\"{:.1}\" y=\"{:.1}\">{}{}</text>",
        LEFT + 32.0,
        y + 4.0,
        escape(name),
        if rows().any(|row| row.paper.is_some()) { " (ring: the paper)" } else { "" }
    );
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
