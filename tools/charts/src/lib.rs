//! Figures as SVG: bars of benchmarks, lines of simulations and of sweeps.
//!
//! Owns how they look. It must not know what is measured.

mod bars;
mod lines;

pub use bars::{Bar, Panel, bars};
pub use lines::{Lines, Series, lines};

/// A picture of this size around what is drawn.
fn page(width: f64, height: f64, font_size: u32, body: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" font-family=\"sans-serif\" font-size=\"{font_size}\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{body}</svg>\n"
    )
}

/// Text as XML has it.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Three digits, as far as they say something.
pub fn short(figure: f64) -> String {
    match figure.abs() {
        f if f >= 100.0 => format!("{figure:.0}"),
        f if f >= 10.0 => format!("{figure:.1}"),
        f if f >= 0.1 || f == 0.0 => format!("{figure:.2}"),
        _ => format!("{figure:.4}"),
    }
}
