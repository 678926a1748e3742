//! RDMA cards as hardware: pipelines, DMA engines, buses, links and a switch on virtual time, around the
//! core's [`qpc`](starverbs_core::qpc). Where [`Net`](crate::Net) shows what the transport does, this shows
//! how fast a card is.
//!
//! - [`Params`]: what everything is like, from `params.toml`, each number with its source;
//! - [`run()`]: one run, and what it showed;
//! - [`Plan`]: an experiment as TOML, many runs;
//! - [`Report`]: its figure as CSV, SVG and a table beside the paper's points;
//! - [`Statements`]: the paper's sentences, judged by the figures.
//!
//! No figure has code of its own: what varies between them is in the plans. At the end of each run all that
//! began must have ended, and every byte and doorbell be accounted for.

mod calls;
mod card;
mod check;
mod dma;
mod events;
mod fabric;
mod host;
mod load;
mod params;
mod plan;
mod report;
mod run;
mod statements;
mod transport;

pub use events::{EventQueue, Picos};
pub use params::{DEFAULT_PARAMS, ParamError, Params, RnicOp, Settings, WorkloadKind};
pub use plan::{Axis, Finished, Metric, PLANS, PaperPoint, Plan, PlanError, Series};
pub use report::{Report, Row};
pub use run::{RunError, RunResult, run};
pub use statements::{PAPERS, Statement, Statements, Verdict};
