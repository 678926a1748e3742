//! Lines over a logarithmic axis or one of named steps, with the points of a reference as rings.

use std::fmt::Write as _;

use crate::{escape, page};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 34.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 56.0;
const LEGEND_ROW: f64 = 18.0;
const COLOURS: [&str; 7] = ["#c0392b", "#2e6da4", "#3b8f4a", "#8e5aa8", "#c98a1b", "#555555", "#16a085"];

/// Where values lie on the picture.
struct Frame {
    x: (f64, f64),
    logarithmic: bool,
    y: (f64, f64),
}

impl Frame {
    fn x(&self, value: u32) -> f64 {
        let share = (self.along(value) - self.x.0) / (self.x.1 - self.x.0);
        LEFT + share * (WIDTH - LEFT - RIGHT)
    }
    /// The value as the axis counts it.
    fn along(&self, value: u32) -> f64 {
        let value = f64::from(value);
        if self.logarithmic { value.max(1.0).ln() } else { value }
    }
    fn y(&self, value: f64) -> f64 {
        let share = (value - self.y.0) / (self.y.1 - self.y.0);
        HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
    }
}

/// A figure.
pub struct Lines {
    /// What stands above it
    pub title: String,
    /// What the axis from left to right has
    pub x: String,
    /// Names of its steps, evenly spaced, if the points' first figures are steps; else it is logarithmic
    pub steps: Vec<String>,
    /// What the axis upward has
    pub y: String,
    /// Whether that axis begins at 0, or at about the least value
    pub zero_based: bool,
    /// What rings are, as the legend says it
    pub reference: &'static str,
    /// The lines
    pub series: Vec<Series>,
}

/// A line.
pub struct Series {
    /// Its name in the legend
    pub name: String,
    /// Where it passes, from left to right
    pub points: Vec<(u32, f64)>,
    /// Points of the reference
    pub rings: Vec<(u32, f64)>,
}

/// An SVG of a figure.
pub fn lines(figure: &Lines) -> String {
    let frame = frame(figure);
    let mut body = String::new();
    axes(&mut body, figure, &frame);
    for (number, series) in figure.series.iter().enumerate() {
        line(&mut body, figure.reference, &frame, series, number);
    }
    page(WIDTH, HEIGHT + LEGEND_ROW * (figure.series.len() as f64 + 1.0), 12, &body)
}

fn frame(figure: &Lines) -> Frame {
    let all = || figure.series.iter().flat_map(|series| series.points.iter().chain(&series.rings));
    let mut frame = Frame { x: (f64::MAX, f64::MIN), logarithmic: figure.steps.is_empty(), y: (0.0, 0.0) };
    for value in all().map(|point| point.0).chain((0..).zip(&figure.steps).map(|(step, _)| step)) {
        let x = frame.along(value);
        frame.x = (frame.x.0.min(x), frame.x.1.max(x));
    }
    let ys = all().map(|point| point.1);
    let (least, most) = ys.fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), y| (low.min(y), high.max(y)));
    let least = if figure.zero_based { 0.0 } else { (least * 0.9).floor().max(0.0) };
    frame.x.1 = frame.x.1.max(frame.x.0 + 1e-9);
    frame.y = (least, most * 1.08);
    frame
}

fn axes(body: &mut String, figure: &Lines, frame: &Frame) {
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    let _ = writeln!(
        body,
        "<text x=\"{LEFT}\" y=\"22\" font-size=\"15\" font-weight=\"bold\">{}</text>\n\
         <path d=\"M{LEFT} {TOP}V{bottom}H{right}\" fill=\"none\" stroke=\"#333333\"/>",
        escape(&figure.title)
    );
    let step = round_step((frame.y.1 - frame.y.0) / 5.0);
    let (first, last) = ((frame.y.0 / step).ceil() as i64, (frame.y.1 / step).floor() as i64);
    for number in first..=last {
        let value = number as f64 * step;
        let y = frame.y(value);
        let _ = writeln!(
            body,
            "<path d=\"M{LEFT} {y:.1}H{right}\" stroke=\"#e4e4e4\"/><text x=\"{:.1}\" y=\"{:.1}\" \
             text-anchor=\"end\">{}</text>",
            LEFT - 6.0,
            y + 4.0,
            tick(value, step)
        );
    }
    let mut values: Vec<u32> = figure.series.iter().flat_map(|s| &s.points).map(|point| point.0).collect();
    values.sort_unstable();
    values.dedup();
    let mut free_from = f64::MIN;
    for value in values {
        let x = frame.x(value);
        let _ = writeln!(body, "<path d=\"M{x:.1} {bottom}v5\" stroke=\"#333333\"/>");
        if x > free_from {
            let name =
                figure.steps.get(value as usize).map_or_else(|| value.to_string(), |name| escape(name));
            let _ = writeln!(
                body,
                "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{name}</text>",
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
        escape(&figure.x),
        (TOP + bottom) / 2.0,
        escape(&figure.y),
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

fn line(body: &mut String, reference: &str, frame: &Frame, series: &Series, number: usize) {
    let colour = COLOURS[number % COLOURS.len()];
    // what lies upon another line lets it show through, and rings about the same point have different sizes
    let dash = ["", " stroke-dasharray=\"9 5\"", " stroke-dasharray=\"3 4\""][number % 3];
    let radius = 5.0 + 2.0 * number as f64;
    let at = |&(x, y): &(u32, f64)| (frame.x(x), frame.y(y));
    let points: Vec<String> = series.points.iter().map(at).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let _ = writeln!(
        body,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>",
        points.join(" ")
    );
    for (x, y) in series.points.iter().map(at) {
        let _ = writeln!(body, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\" fill=\"{colour}\"/>");
    }
    for (x, y) in series.rings.iter().map(at) {
        let _ = writeln!(
            body,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"none\" stroke=\"{colour}\" \
             stroke-width=\"1.5\"/>"
        );
    }
    let y = HEIGHT + LEGEND_ROW * number as f64;
    let ring =
        if series.rings.is_empty() { String::new() } else { format!(" (ring: {})", escape(reference)) };
    let _ = writeln!(
        body,
        "<path d=\"M{LEFT} {y}h24\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/><text x=\"{:.1}\" \
         y=\"{:.1}\">{}{ring}</text>",
        LEFT + 32.0,
        y + 4.0,
        escape(&series.name),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_rings_and_names_are_drawn() {
        let series =
            |name: &str, rings| Series { name: name.to_owned(), points: vec![(1, 1.0), (100, 2.0)], rings };
        let figure = Lines {
            title: "a < b".to_owned(),
            x: "connections".to_owned(),
            steps: vec![],
            y: "rate".to_owned(),
            zero_based: true,
            reference: "the paper",
            series: vec![series("one", vec![(100, 1.5)]), series("two", vec![])],
        };
        let svg = lines(&figure);
        assert_eq!(
            (
                svg.matches("<polyline").count(),
                svg.matches("fill=\"none\" stroke=\"#c0392b\" stroke-width=\"1.5\"").count()
            ),
            (2, 1)
        );
        assert_eq!(svg.matches("(ring: the paper)").count(), 1);
        assert!(svg.contains("a &lt; b") && svg.ends_with("</svg>\n"), "{svg}");
    }
}
