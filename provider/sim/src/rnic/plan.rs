//! Experiments as TOML: what varies along the axis, what differs between the series, what the paper shows.

use std::ops::ControlFlow;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde::Deserialize;
use thiserror::Error;

use super::params::{ParamError, Params, Settings};
use super::run::{RunError, RunResult, run};

macro_rules! plans {
    ($($name:literal)*) => {
        /// The plans that ship with the simulator: name and text, in the order of the paper.
        pub const PLANS: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("../../plans/", $name, ".toml"))),)*];
    };
}

plans! {
    "csrna-1a" "csrna-1b" "csrna-1c" "csrna-rate" "csrna-7a" "csrna-7b" "csrna-7c"
    "csrna-8a" "csrna-8b" "csrna-8c"
    "csrna-9a" "csrna-9b" "csrna-9c" "csrna-9d" "csrna-9e" "csrna-table1" "csrna-formula2"
    "csrna-mtt" "csrna-clean" "csrna-loss"
    "csrna-onchip" "csrna-million"
    "star-1" "star-10a" "star-10b" "star-11a" "star-11b" "star-12" "star-slots" "star-gbps" "star-loss"
    "star-buffer" "star-clients"
}

/// An experiment.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// What the figure shows
    pub title: String,
    /// Where it differs from the paper, and why
    #[serde(default)]
    pub note: String,
    /// What is drawn
    pub metric: Metric,
    /// Whether each series is drawn relative to its greatest value
    #[serde(default)]
    pub normalise: bool,
    /// The series at whose last point all are 1
    #[serde(default)]
    pub relative_to: Option<String>,
    /// Models of the parameter file, for all series
    #[serde(default)]
    models: Vec<String>,
    /// Along the axis
    pub x: Axis,
    /// For all series
    #[serde(default)]
    set: Settings,
    /// The lines
    pub series: Vec<Series>,
}

/// What is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Metric {
    /// Million messages a second
    Rate,
    /// Mean latency in microseconds
    Latency,
    /// Megabytes on the chip for connections; needs no run
    OnChip,
}

/// What varies.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Axis {
    /// Its text
    pub label: String,
    /// The parameter
    set: String,
    /// Its values
    pub values: Vec<u32>,
}

/// One line.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Series {
    /// Its text
    pub name: String,
    /// Models of the parameter file
    #[serde(default)]
    models: Vec<String>,
    #[serde(default)]
    set: Settings,
    /// Connections that the card has; beyond, it carries nothing
    #[serde(default)]
    capacity: Option<u32>,
    /// The paper's points
    #[serde(default)]
    pub paper: Vec<PaperPoint>,
}

/// A point that the paper has, and how that is known. Nothing is read off its pictures.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PaperPoint {
    /// Where on the axis
    pub x: u32,
    /// What the paper has there
    pub y: f64,
    /// Where its text says so: section, and a few words
    #[serde(default)]
    pub text: Option<String>,
    /// It does not: by which formula this follows from what it says. No evidence for the simulator
    #[serde(default)]
    pub derived: Option<String>,
}

impl PaperPoint {
    /// Whether the paper's text says so.
    pub fn is_text(&self) -> bool {
        self.text.is_some()
    }

    /// Where it is from, as tables have it.
    pub fn source(&self) -> String {
        match (&self.text, &self.derived) {
            (Some(text), _) => format!("text: {text}"),
            (None, derived) => format!("derived: {}", derived.as_deref().unwrap_or_default()),
        }
    }
}

/// Why a plan has no result.
#[derive(Debug, Error)]
pub enum PlanError {
    /// The plan is not TOML, or has unknown names
    #[error("{0}")]
    Toml(#[from] Box<toml::de::Error>),
    /// Its values do not fit the parameters
    #[error("{0}")]
    Param(#[from] ParamError),
    /// It contradicts itself
    #[error("{0}")]
    Plan(String),
    /// One of its runs failed
    #[error("{series}, {x}: {error}")]
    Run {
        /// The line
        series: String,
        /// The point
        x: u32,
        /// What failed
        error: RunError,
    },
}

/// A plan that was carried out.
#[derive(Clone, Debug)]
pub struct Finished {
    /// The plan
    pub plan: Plan,
    /// Of each series and x what the run showed; `None` beyond a capacity, and where no run is needed
    pub outcomes: Vec<Vec<Option<RunResult>>>,
    /// Of each series and x what is drawn
    pub values: Vec<Vec<f64>>,
}

struct ExperimentRun {
    series: usize,
    x: u32,
    params: Params,
    /// How long it is, about
    weight: f64,
}

impl Plan {
    /// Reads a plan.
    pub fn read(text: &str) -> Result<Plan, PlanError> {
        let plan: Plan = toml::from_str(text).map_err(Box::new)?;
        let on_axis = |x: &u32| plan.x.values.contains(x);
        for series in &plan.series {
            for point in &series.paper {
                let (name, x) = (&series.name, point.x);
                if !on_axis(&x) {
                    return Err(PlanError::Plan(format!("{name}: the paper's point {x} is not on the axis")));
                }
                if point.text.is_some() == point.derived.is_some() {
                    let what = "says neither or both of `text` and `derived`";
                    return Err(PlanError::Plan(format!("{name}: the paper's point {x} {what}")));
                }
            }
        }
        let known = |name: &String| plan.series.iter().any(|series| series.name == *name);
        match &plan.relative_to {
            Some(name) if !known(name) => {
                Err(PlanError::Plan(format!("relative_to: there is no series {name}")))
            }
            _ => Ok(plan),
        }
    }

    /// The shipped plan of that name.
    pub fn shipped(name: &str) -> Option<&'static str> {
        PLANS.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
    }

    fn params(&self, series: &Series, x: u32, text: &str) -> Result<Params, PlanError> {
        let axis = Settings::from([(self.x.set.clone(), toml::Value::from(x))]);
        let models: Vec<&str> = self.models.iter().chain(&series.models).map(String::as_str).collect();
        Ok(Params::read_models(text, &models, &[&self.set, &series.set, &axis])?)
    }

    fn jobs(&self, text: &str) -> Result<Vec<ExperimentRun>, PlanError> {
        let mut jobs = Vec::new();
        for (number, series) in self.series.iter().enumerate() {
            for &x in &self.x.values {
                let params = self.params(series, x, text)?;
                let weight = 30_000.0 + f64::from(params.qps);
                jobs.push(ExperimentRun { series: number, x, params, weight });
            }
        }
        Ok(jobs)
    }

    /// Carries the plan out, with the parameters of `text`, on so many threads. `progress` gets the share
    /// done, and may end it; the result does not depend on the threads.
    pub fn carry_out(
        self,
        text: &str,
        threads: usize,
        progress: impl Fn(f64) -> ControlFlow<()> + Sync,
    ) -> Result<Finished, PlanError> {
        let jobs = self.jobs(text)?;
        let outcomes = if self.metric == Metric::OnChip {
            jobs.iter().map(|_| None).collect()
        } else {
            self.run_all(&jobs, threads, progress)?
        };
        let values = jobs.iter().zip(&outcomes).map(|(job, outcome)| self.value(job, outcome.as_ref()));
        let values: Vec<f64> = values.collect::<Result<_, _>>()?;
        let columns = self.x.values.len().max(1);
        let mut values: Vec<Vec<f64>> = values.chunks(columns).map(<[f64]>::to_vec).collect();
        if self.normalise {
            for line in &mut values {
                let greatest = line.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
                line.iter_mut().for_each(|value| *value /= greatest);
            }
        }
        if let Some(name) = &self.relative_to {
            let whole = self.series.iter().position(|series| series.name == *name);
            let whole = whole.and_then(|number| values[number].last().copied()).unwrap_or(1.0);
            values.iter_mut().flatten().for_each(|value| *value /= whole);
        }
        let outcomes = outcomes.chunks(columns).map(<[Option<RunResult>]>::to_vec).collect();
        Ok(Finished { plan: self, outcomes, values })
    }

    fn beyond_capacity(&self, job: &ExperimentRun) -> bool {
        self.series[job.series].capacity.is_some_and(|capacity| job.params.qps > capacity)
    }

    fn value(&self, job: &ExperimentRun, outcome: Option<&RunResult>) -> Result<f64, PlanError> {
        if self.metric == Metric::OnChip {
            let config = job.params.server_config();
            config.check().map_err(|error| PlanError::Plan(error.to_string()))?;
            return Ok(config.on_chip().total() as f64 / 1e6);
        }
        Ok(outcome.map_or(0.0, |outcome| match self.metric {
            Metric::Latency => outcome.latency * 1e6,
            _ => outcome.rate / 1e6,
        }))
    }

    fn run_all(
        &self,
        jobs: &[ExperimentRun],
        threads: usize,
        progress: impl Fn(f64) -> ControlFlow<()> + Sync,
    ) -> Result<Vec<Option<RunResult>>, PlanError> {
        let total: f64 = jobs.iter().map(|job| job.weight).sum();
        let results: Mutex<Vec<Option<Result<RunResult, RunError>>>> =
            Mutex::new(jobs.iter().map(|_| None).collect());
        let shares = Mutex::new(vec![0.0; jobs.len()]);
        let (next, ended) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = || {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(job) = jobs.get(number) else { return };
                if self.beyond_capacity(job) || ended.load(Ordering::Relaxed) {
                    continue;
                }
                let report = |share: f64| {
                    let mut shares = shares.lock().unwrap_or_else(|broken| broken.into_inner());
                    shares[number] = share * job.weight;
                    let flow = progress(shares.iter().sum::<f64>() / total);
                    if flow.is_break() {
                        ended.store(true, Ordering::Relaxed);
                    }
                    flow
                };
                let outcome = run(&job.params, report);
                if outcome.is_err() {
                    ended.store(true, Ordering::Relaxed);
                }
                let _ = report(1.0);
                results.lock().unwrap_or_else(|broken| broken.into_inner())[number] = Some(outcome);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.clamp(1, jobs.len().max(1)) {
                scope.spawn(work);
            }
            work();
        });
        let results = results.into_inner().unwrap_or_else(|broken| broken.into_inner());
        let failed = |job: &ExperimentRun, error| {
            let series = self.series[job.series].name.clone();
            PlanError::Run { series, x: job.x, error }
        };
        let mut outcomes = Vec::new();
        for (job, result) in jobs.iter().zip(results) {
            outcomes.push(match result {
                Some(result) => Some(result.map_err(|error| failed(job, error))?),
                None if self.beyond_capacity(job) => None,
                // left out, as the plan was ended before
                None => return Err(failed(job, RunError::Ended)),
            });
        }
        Ok(outcomes)
    }
}
