//! A figure that is code: its texts, its axis, and what runs it.

use crate::rnic::Report;

/// A figure: what it draws, and how.
pub struct Figure {
    /// Its name: that of its paper, and its number there
    pub name: &'static str,
    /// What it shows
    pub title: &'static str,
    /// Of the axis
    pub x: &'static str,
    /// Of what is drawn
    pub y: &'static str,
    /// What was chosen, and where it differs from the paper
    pub note: &'static str,
    /// The axis' values
    pub values: &'static [u32],
    /// The lines
    pub series: &'static [&'static str],
    /// Of each line its points
    pub(crate) run: fn(&Figure) -> Vec<Vec<f64>>,
}

impl Figure {
    /// Runs it: the same each time.
    pub fn carry_out(&self) -> Report {
        let lines = (self.run)(self);
        let mut points = Vec::new();
        for (series, line) in self.series.iter().zip(&lines) {
            points.extend(self.values.iter().zip(line).map(|(x, y)| ((*series).to_owned(), *x, *y)));
        }
        Report::of_points([self.name, self.title, self.x, self.y, self.note], points)
    }
}

/// All of them, in the order of their papers.
pub fn figures() -> impl Iterator<Item = &'static Figure> {
    crate::onerma::figures::FIGURES.iter().chain(crate::strom::figures::FIGURES)
}
