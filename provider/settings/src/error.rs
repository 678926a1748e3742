//! What can be wrong with a setting. The doc comments are the messages' sources: key, what was given, what is
//! allowed.

use std::fmt;
use std::path::PathBuf;

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SettingOrigin {
    /// An environment variable.
    Environment,
    /// A key of this TOML file.
    File(PathBuf),
}

impl SettingOrigin {
    /// The key as the person wrote it: `STARVERBS_MTU`, or `mtu (in FILE)`.
    pub(crate) fn spell(&self, name: &str) -> String {
        match self {
            SettingOrigin::Environment => format!("STARVERBS_{name}"),
            SettingOrigin::File(path) => format!("{} (in {})", name.to_ascii_lowercase(), path.display()),
        }
    }
}

/// A key or value that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// A key that no setting has.
    #[error("unknown setting {key}{}; `starverbs info --settings` lists all", Hint(.nearest))]
    Unknown {
        /// The key as it was written.
        key: String,
        /// A setting with nearly the same name, spelt as it should have been written.
        nearest: Option<String>,
    },
    /// A value outside what its key allows.
    #[error("{key}: {given:?}: {reason}; allowed: {allowed}")]
    Value {
        /// The key as it was written.
        key: String,
        /// The value as it was written.
        given: String,
        /// What the parser stumbled over.
        reason: String,
        /// The key's syntax.
        allowed: &'static str,
    },
    /// A key that only the environment may carry.
    #[error("{key}: may only be set in the environment")]
    EnvironmentOnly {
        /// The key as it was written.
        key: String,
    },
    /// A variable that is not text.
    #[error("{key}: the value is not UTF-8")]
    NotText {
        /// The variable's name.
        key: String,
    },
    /// A file that is not TOML.
    #[error("{}: not TOML: {reason}", .file.display())]
    Syntax {
        /// The file.
        file: PathBuf,
        /// The parser's message, with the line.
        reason: String,
    },
    /// A file that cannot be read.
    #[error("{}: {reason}", .file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// The system's message.
        reason: std::io::Error,
    },
}

struct Hint<'a>(&'a Option<String>);

impl fmt::Display for Hint<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(name) => write!(f, "; did you mean {name}?"),
            None => Ok(()),
        }
    }
}
