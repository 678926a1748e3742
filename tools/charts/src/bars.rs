//! Panels of bars, each of one scale.

use std::fmt::Write as _;

use crate::{escape, page, short};

const WIDTH: usize = 960;
const LABELS: usize = 250;
const VALUES: usize = 70;
const BAR: usize = 18;
const GAP: usize = 6;
const TITLE: usize = 40;

/// A bar of a panel.
pub struct Bar {
    /// What stands before it
    pub label: String,
    /// Its length, by the panel's scale; not negative
    pub value: f64,
    /// Its colour, as SVG has it
    pub fill: &'static str,
}

/// Bars of one scale.
pub struct Panel {
    /// What stands above them
    pub title: String,
    /// Which way is better is said beside the title
    pub less_is_better: bool,
    /// From the top down
    pub bars: Vec<Bar>,
}

/// An SVG of these panels, without the empty ones; the longest bar of each fills its width.
pub fn bars(panels: &[Panel]) -> String {
    let mut body = String::new();
    let mut top = 10;
    for panel in panels.iter().filter(|panel| !panel.bars.is_empty()) {
        top += draw(&mut body, panel, top);
    }
    page(WIDTH as f64, top as f64, 13, &body)
}

/// Draws one panel from `top` down; gives its height.
fn draw(body: &mut String, panel: &Panel, top: usize) -> usize {
    let largest = panel.bars.iter().map(|bar| bar.value).fold(f64::MIN_POSITIVE, f64::max);
    let hint = if panel.less_is_better { "less is better" } else { "more is better" };
    let _ = writeln!(
        body,
        "<text x=\"10\" y=\"{y}\" font-size=\"15\" font-weight=\"bold\">{title} <tspan \
         font-weight=\"normal\" fill=\"#666666\">({hint})</tspan></text>",
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bar_is_drawn_and_the_largest_fills_the_panel() {
        let bar = |label: &str, value| Bar { label: label.to_owned(), value, fill: "#c0392b" };
        let bars_of = |bars| Panel { title: "rate".to_owned(), less_is_better: false, bars };
        let svg = bars(&[bars_of(vec![bar("a < b", 1.0), bar("c", 2.0)]), bars_of(vec![])]);
        assert_eq!(svg.matches("fill=\"#c0392b\"").count(), 2, "{svg}");
        assert_eq!(svg.matches("more is better").count(), 1, "an empty panel is left out");
        assert!(svg.contains("a &lt; b"));
        assert!(svg.contains(&format!("width=\"{}.0\" height=\"{BAR}\"", WIDTH - LABELS - VALUES)), "{svg}");
    }
}
