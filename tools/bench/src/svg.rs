//! The picture: one panel of bars a metric.

use std::fmt::Write as _;

use crate::case::{Metric, Part};
use crate::report::short;
use crate::round::Figure;

const WIDTH: usize = 960;
const LABELS: usize = 250;
const VALUES: usize = 70;
const BAR: usize = 18;
const GAP: usize = 6;
const TITLE: usize = 40;

/// A bar of a panel.
pub(crate) struct Bar {
    pub(crate) label: String,
    pub(crate) value: f64,
    /// Its colour
    pub(crate) fill: &'static str,
}

/// Bars of one scale.
pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) less_is_better: bool,
    pub(crate) bars: Vec<Bar>,
}

/// An SVG of all figures.
pub(crate) fn picture(figures: &[Figure]) -> String {
    let bar = |figure: &Figure| {
        let value = figure.median()?;
        Some(Bar { label: figure.row.to_owned(), value, fill: colour(figure.part) })
    };
    let panel = |metric: Metric| Panel {
        title: metric.title().to_owned(),
        less_is_better: metric.smaller_is_better(),
        bars: figures.iter().filter(|figure| figure.metric == metric).filter_map(bar).collect(),
    };
    page(&Metric::ALL.map(panel))
}

/// An SVG of these panels, without the empty ones; the longest bar of each fills its width.
pub(crate) fn page(panels: &[Panel]) -> String {
    let mut body = String::new();
    let mut top = 10;
    for panel in panels.iter().filter(|panel| !panel.bars.is_empty()) {
        top += draw(&mut body, panel, top);
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {top}\" width=\"{WIDTH}\" height=\"{top}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{body}</svg>\n"
    )
}

/// Draws one panel from `top` down; gives its height.
fn draw(body: &mut String, panel: &Panel, top: usize) -> usize {
    let largest = panel.bars.iter().map(|bar| bar.value).fold(f64::MIN_POSITIVE, f64::max);
    let hint = if panel.less_is_better { "less is better" } else { "more is better" };
    let _ = writeln!(
        body,
        "<text x=\"10\" y=\"{y}\" font-size=\"15\" font-weight=\"bold\">{title} <tspan font-weight=\"normal\" \
         fill=\"#666666\">({hint})</tspan></text>",
        y = top + 22,
        title = escape(&panel.title),
    );
    for (index, bar) in panel.bars.iter().enumerate() {
        let y = top + TITLE + index * (BAR + GAP);
        let width = (WIDTH - LABELS - VALUES) as f64 * bar.value / largest;
        let text = y + BAR - 5;
        let _ = writeln!(
            body,
            "<text x=\"{label}\" y=\"{text}\" text-anchor=\"end\">{row}</text>\
             <rect x=\"{LABELS}\" y=\"{y}\" width=\"{width:.1}\" height=\"{BAR}\" fill=\"{fill}\"/>\
             <text x=\"{after:.1}\" y=\"{text}\">{value}</text>",
            label = LABELS - 8,
            row = escape(&bar.label),
            fill = bar.fill,
            after = LABELS as f64 + width + 6.0,
            value = short(bar.value),
        );
    }
    TITLE + panel.bars.len() * (BAR + GAP) + 12
}

fn colour(part: Part) -> &'static str {
    match part {
        Part::Floor => "#b8b8b8",
        Part::Card | Part::Scale => "#c0392b",
        Part::Ucx => "#2e6da4",
        Part::Fabric => "#6aa56a",
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_measured_figure_has_a_bar_and_the_largest_fills_the_panel() {
        let figure = |row, samples: &[f64]| Figure {
            part: Part::Card,
            row,
            metric: Metric::Rate8B,
            samples: samples.to_vec(),
            problem: None,
        };
        let svg = picture(&[figure("a < b", &[1.0]), figure("c", &[2.0]), figure("none", &[])]);
        assert_eq!(svg.matches("fill=\"#c0392b\"").count(), 2, "{svg}");
        assert!(svg.contains("a &lt; b"));
        assert!(svg.contains(&format!("width=\"{}.0\" height=\"{BAR}\"", WIDTH - LABELS - VALUES)), "{svg}");
    }
}
