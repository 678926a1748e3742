//! The papers' sentences that can be measured, as TOML: each names what of the figures it is about, and
//! within which bounds it holds. Whether it does is computed from the figures of a run.

use std::fmt::Write as _;

use serde::Deserialize;

use super::plan::PlanError;
use super::report::{Report, short};

macro_rules! papers {
    ($($name:literal $title:literal)*) => {
        /// The papers: the name that those of their figures begin with, title, and statements.
        pub const PAPERS: &[(&str, &str, &str)] =
            &[$(($name, $title, include_str!(concat!("../../statements/", $name, ".toml"))),)*];
    };
}

papers! {
    "csrna" "csRNA: Kang et al., Towards Connection-Scalable RNIC Architecture, 2023"
    "star" "StaR: Wang et al., StaR: Breaking the Scalability Limit for RDMA, ICNP 2021"
    "1rma" "1RMA: Singhvi et al., 1RMA: Re-envisioning Remote Memory Access, SIGCOMM 2020"
    "strom" "StRoM: Sidler et al., StRoM: Smart Remote Memory, EuroSys 2020"
}

/// All statements of a paper.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Statements {
    /// How bounds were chosen
    pub bounds: String,
    /// In the paper's order
    #[serde(default)]
    pub statement: Vec<Statement>,
}

/// A sentence of the paper.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Statement {
    /// Where it stands
    pub section: String,
    /// Its words, shortened
    pub text: String,
    /// What is asked of the figures; all of it must hold
    #[serde(default)]
    pub check: Vec<Check>,
    /// Why it is not asked
    #[serde(default)]
    pub unasked: Option<String>,
    /// What explains the outcome
    #[serde(default)]
    pub note: Option<String>,
}

/// A number of the figures, and its bounds.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    /// What the number is, in words
    pub what: String,
    /// The product of these
    of: Vec<Point>,
    /// Divided by the product of these
    #[serde(default)]
    over: Vec<Point>,
    /// Less this
    #[serde(default)]
    less: Option<Point>,
    /// In so many parts of the unit: 1e6 makes bytes of megabytes
    #[serde(default = "one")]
    scale: f64,
    #[serde(default)]
    at_least: Option<f64>,
    #[serde(default)]
    at_most: Option<f64>,
}

fn one() -> f64 {
    1.0
}

/// Figure, series, and a value of the axis, `greatest`, `least`, `first` or `last`. With `cpu` behind a value
/// of the axis: the share of CPU time there.
#[derive(Clone, Debug, Deserialize)]
struct Point(String, String, At, #[serde(default)] Column);

/// Which number of a point.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Column {
    #[default]
    Drawn,
    Cpu,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum At {
    X(u32),
    Name(Extreme),
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Extreme {
    Greatest,
    Least,
    First,
    Last,
}

/// What became of a statement.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// The values of its checks, and whether all are within their bounds
    Asked {
        /// In the checks' order
        values: Vec<f64>,
        /// Whether it holds
        holds: bool,
    },
    /// Nothing is asked of any figure
    Unasked,
}

impl Point {
    fn value(&self, reports: &[Report]) -> Option<f64> {
        let Point(figure, series, at, column) = self;
        let report = reports.iter().find(|report| report.name == *figure)?;
        let values = || report.values(series);
        match at {
            At::X(x) if *column == Column::Cpu => report.cpu(series, *x),
            At::Name(_) if *column == Column::Cpu => None,
            At::X(x) => report.value(series, *x),
            At::Name(Extreme::Greatest) => values().reduce(f64::max),
            At::Name(Extreme::Least) => values().reduce(f64::min),
            At::Name(Extreme::First) => values().next(),
            At::Name(Extreme::Last) => values().last(),
        }
    }

    /// Whether a figure draws it, of which name, lines and axis are given.
    fn is_in(&self, (name, series, values): &(&str, Vec<&str>, &[u32])) -> bool {
        let Point(figure, line, at, column) = self;
        let on_axis = match at {
            At::X(x) => values.contains(x),
            At::Name(_) => *column == Column::Drawn,
        };
        figure == name && series.contains(&line.as_str()) && on_axis
    }
}

impl Check {
    fn points(&self) -> impl Iterator<Item = &Point> {
        self.of.iter().chain(&self.over).chain(&self.less)
    }

    fn value(&self, reports: &[Report]) -> Option<f64> {
        let product =
            |points: &[Point]| points.iter().map(|point| point.value(reports)).product::<Option<f64>>();
        let less = self.less.iter().map(|point| point.value(reports)).sum::<Option<f64>>()?;
        Some((product(&self.of)? / product(&self.over)? - less) * self.scale)
    }

    fn holds(&self, value: f64) -> bool {
        self.at_least.is_none_or(|least| value >= least) && self.at_most.is_none_or(|most| value <= most)
    }

    /// Its value and its bounds, as tables have them.
    fn cells(&self, value: f64) -> (String, String) {
        (format!("{}: {}", self.what, short(value)), self.bounds())
    }

    fn bounds(&self) -> String {
        match (self.at_least, self.at_most) {
            (Some(least), Some(most)) => format!("{least} to {most}"),
            (Some(least), None) => format!("at least {least}"),
            (None, Some(most)) => format!("at most {most}"),
            (None, None) => "any".to_owned(),
        }
    }
}

impl Statement {
    /// Judges it by the figures. `None`: some that it names are not among them.
    pub fn judge(&self, reports: &[Report]) -> Option<Verdict> {
        if self.check.is_empty() {
            return Some(Verdict::Unasked);
        }
        let values = self.check.iter().map(|check| check.value(reports)).collect::<Option<Vec<f64>>>()?;
        let holds = self.check.iter().zip(&values).all(|(check, value)| check.holds(*value));
        Some(Verdict::Asked { values, holds })
    }
}

impl Statements {
    /// Reads those of a paper.
    pub fn read(text: &str) -> Result<Statements, PlanError> {
        let all: Statements = toml::from_str(text).map_err(Box::new)?;
        let wrong = |statement: &&Statement| statement.check.is_empty() != statement.unasked.is_some();
        match all.statement.iter().find(wrong) {
            Some(statement) => Err(PlanError::Plan(format!(
                "{:?} has neither or both of `check` and `unasked`",
                statement.text
            ))),
            None => Ok(all),
        }
    }

    /// The first number that none of the figures draws; of each its name, its lines and its axis.
    pub fn unknown(&self, figures: &[(&str, Vec<&str>, &[u32])]) -> Option<String> {
        let mut points = self.statement.iter().flat_map(|statement| &statement.check).flat_map(Check::points);
        let drawn = |point: &&Point| figures.iter().any(|figure| point.is_in(figure));
        points.find(|point| !drawn(point)).map(|point| format!("{point:?}"))
    }

    /// A row for each statement that the figures judge, as a Markdown table; and how many hold, do not, and
    /// are not asked.
    pub fn table(&self, reports: &[Report]) -> (String, [usize; 3]) {
        let mut text =
            String::from("| section | the paper | here | asked | holds |\n|---|---|---|---|---|\n");
        let mut counts = [0; 3];
        for statement in &self.statement {
            let Some(verdict) = statement.judge(reports) else { continue };
            let (at, holds) = match &verdict {
                Verdict::Asked { holds: true, .. } => (0, "yes"),
                Verdict::Asked { holds: false, .. } => (1, "**no**"),
                Verdict::Unasked => (2, "-"),
            };
            counts[at] += 1;
            let (here, asked) = statement.cells(&verdict);
            let note = statement.note.as_ref().map_or(String::new(), |note| format!(" ({note})"));
            let Statement { section, text: words, .. } = statement;
            let _ = writeln!(text, "| {section} | {words} | {here}{note} | {asked} | {holds} |");
        }
        (text, counts)
    }
}

impl Statement {
    fn cells(&self, verdict: &Verdict) -> (String, String) {
        let Verdict::Asked { values, .. } = verdict else {
            return (self.unasked.clone().unwrap_or_default(), "-".to_owned());
        };
        let cells = self.check.iter().zip(values).map(|(check, value)| check.cells(*value));
        let (here, asked): (Vec<String>, Vec<String>) = cells.unzip();
        (here.join("; "), asked.join("; "))
    }
}
