//! Why a call fails, and which errno the C edge makes of it.

use starverbs_backend::BackendError;
use starverbs_core::NicError;
use starverbs_rings::PushError;
use starverbs_settings::SettingsError;
use thiserror::Error;

/// A verbs call failed.
#[derive(Debug, Error)]
pub enum VerbsError {
    /// The card refused.
    #[error(transparent)]
    Card(#[from] NicError),
    /// The port could not be opened.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A `STARVERBS_*` variable or the TOML file is wrong.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// An argument is wrong.
    #[error("invalid argument: {0}")]
    Invalid(&'static str),
    /// Others use the object.
    #[error("in use by {0}")]
    Busy(&'static str),
    /// The board has no function to spare.
    #[error(
        "STARVERBS_DEVICE=board:{path}: all functions there ({functions}) are in use; one is free when its \
         program ends, and `starverbs board --sockets N` has N of them"
    )]
    BoardTaken {
        /// The first function's socket
        path: String,
        /// How many there are
        functions: usize,
    },
    /// No memory, no free slot in a queue, or a limit is reached.
    #[error("no room: {0}")]
    NoMemory(&'static str),
    /// Memory is not mapped, or not with the rights asked for.
    #[error("bad address")]
    Fault,
    /// Nothing there, and the descriptor does not block.
    #[error("nothing there yet")]
    Again,
    /// Past the end of a table.
    #[error("no such entry")]
    NoData,
    /// Not offered by this card.
    #[error("not offered: {0}")]
    Unsupported(&'static str),
    /// The card was opened by another process: this is a forked child.
    #[error("this card belongs to the parent process")]
    Forked,
    /// The completion queue overran, and is of no use any more.
    #[error("the completion queue overran")]
    Overrun,
    /// The system refused; the errno is its own.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Os(i32),
}

/// Result of a verbs call.
pub type Result<T> = std::result::Result<T, VerbsError>;

impl VerbsError {
    /// The Linux errno that the man pages promise for it.
    pub fn errno(&self) -> i32 {
        match self {
            VerbsError::Card(error) => error.errno(),
            VerbsError::Backend(error) => error.errno(),
            VerbsError::Settings(SettingsError::Unreadable { reason, .. }) => {
                of_host(reason).unwrap_or(libc::EINVAL)
            }
            VerbsError::Settings(_) | VerbsError::Invalid(_) => libc::EINVAL,
            VerbsError::Busy(_) | VerbsError::BoardTaken { .. } => libc::EBUSY,
            VerbsError::NoMemory(_) => libc::ENOMEM,
            VerbsError::Fault => libc::EFAULT,
            VerbsError::Again => libc::EAGAIN,
            VerbsError::NoData => libc::ENODATA,
            VerbsError::Unsupported(_) => libc::EOPNOTSUPP,
            VerbsError::Forked | VerbsError::Overrun => libc::EIO,
            VerbsError::Os(errno) => *errno,
        }
    }

    /// The calling thread's last system error.
    pub(crate) fn last_os() -> Self {
        VerbsError::Os(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }
}

/// The errno of a host that has no more of something, which is nobody's mistake.
fn of_host(error: &std::io::Error) -> Option<i32> {
    error.raw_os_error().filter(|errno| [libc::EMFILE, libc::ENFILE, libc::ENOMEM].contains(errno))
}

impl From<starverbs_backend::star::OpenError> for VerbsError {
    fn from(error: starverbs_backend::star::OpenError) -> Self {
        match error {
            starverbs_backend::star::OpenError::Port(error) => error.into(),
            starverbs_backend::star::OpenError::Card(error) => error.into(),
        }
    }
}

impl From<std::io::Error> for VerbsError {
    fn from(error: std::io::Error) -> Self {
        VerbsError::Os(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl From<nix::errno::Errno> for VerbsError {
    fn from(error: nix::errno::Errno) -> Self {
        VerbsError::Os(error as i32)
    }
}

impl From<PushError> for VerbsError {
    #[inline]
    fn from(error: PushError) -> Self {
        match error {
            PushError::Full => VerbsError::NoMemory("the queue is full"),
            PushError::TooManySges => VerbsError::Invalid("too many SGEs"),
            PushError::InlineTooLong => VerbsError::Invalid("too many inline bytes"),
            PushError::NotBegun => VerbsError::Invalid("data for a work request that was not begun"),
        }
    }
}
