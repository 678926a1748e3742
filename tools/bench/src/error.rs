//! Why a measurement gave no figure.
//!
//! Owns the one error type of the benchmarks. A missing tool is a kind of its own because it is reported as a
//! skipped row and not as a failure.

use std::time::Duration;

/// Why a measurement gave no figure; the message is what the report prints.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum BenchError {
    /// A program is not installed.
    #[error("{tool} is not installed (package {package})")]
    Missing {
        /// The program.
        tool: String,
        /// The Debian package that has it.
        package: &'static str,
    },
    /// The card's library has not been built.
    #[error("{path} does not exist (make build)")]
    NotBuilt {
        /// Where the library was looked for.
        path: String,
    },
    /// A child did not end in time and was killed.
    #[error("{what} did not end within {limit:?}")]
    Timeout {
        /// The program.
        what: String,
        /// What it was given.
        limit: Duration,
    },
    /// A child ended with a failure.
    #[error("{what}: {status}: {tail}")]
    Failed {
        /// The program.
        what: String,
        /// How it ended.
        status: String,
        /// The end of what it wrote.
        tail: String,
    },
    /// A child's output did not hold the figure.
    #[error("{what} printed no figure: {tail}")]
    Parse {
        /// The program.
        what: String,
        /// The end of what it wrote.
        tail: String,
    },
    /// A system call failed.
    #[error("{what}: {message}")]
    Os {
        /// The call.
        what: &'static str,
        /// The system's own words.
        message: String,
    },
}

impl BenchError {
    /// The last system error, under the name of the call that met it.
    pub(crate) fn os(what: &'static str) -> Self {
        Self::from_io(what, &std::io::Error::last_os_error())
    }

    /// An I/O error, under the name of the call that met it.
    pub(crate) fn from_io(what: &'static str, error: &std::io::Error) -> Self {
        Self::Os { what, message: error.to_string() }
    }

    /// True where nothing was tried: the row is skipped, and trying again is pointless.
    pub(crate) fn is_skip(&self) -> bool {
        matches!(self, Self::Missing { .. } | Self::NotBuilt { .. })
    }
}

/// What a measurement gives.
pub(crate) type Result<T> = std::result::Result<T, BenchError>;
