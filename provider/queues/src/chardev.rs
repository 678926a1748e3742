//! The character device of a board, `/dev/starN`: what a program asks of the kernel module.
//!
//! `include/starverbs/chardev.h` has the same for C (`tests/board.rs` compiles it against these types),
//! docs/board.md has the rules. All reserved bytes are 0.

use core::mem::size_of;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A request as Linux numbers it: directions 1 (the kernel reads) and 2 (it writes), bytes, number.
const fn request(directions: u32, number: u32, bytes: usize) -> u32 {
    directions << 30 | (bytes as u32) << 16 | IOC_TYPE << 8 | number
}

constants! {
    /// Type of the requests
    "STARVERBS_IOC_TYPE" IOC_TYPE: u32 = 0xbd;
    /// [`Info`]. ENODEV: the board is gone, or was reset since the file was opened. So for all of these
    "STARVERBS_IOC_INFO" IOC_INFO: u32 = request(2, 0, size_of::<Info>());
    /// Carries out a [`Command`]; the board's errno is in its status. EACCES: the file is another process's
    "STARVERBS_IOC_COMMAND" IOC_COMMAND: u32 = request(3, 1, size_of::<Command>());
    /// Makes zeroed [`QueueMemory`]; answers its offset. ENOMEM: beyond RLIMIT_MEMLOCK, or not in one piece
    "STARVERBS_IOC_QUEUE_MEMORY" IOC_QUEUE_MEMORY: u32 = request(3, 2, size_of::<QueueMemory>());
    /// Ends a piece of [`QueueMemory`], named by its offset. EBUSY: a queue lies there
    "STARVERBS_IOC_FREE_QUEUE_MEMORY" IOC_FREE_QUEUE_MEMORY: u32 = request(1, 3, size_of::<QueueMemory>());
    /// Sets the [`EventFd`] that is signalled
    "STARVERBS_IOC_EVENTFD" IOC_EVENTFD: u32 = request(1, 4, size_of::<EventFd>());
}

plain! {
    /// What the context is
    "starverbs_info" Info {
        /// `CAP_*` of the board, as far as the kernel passes it on
        caps: u64,
        /// Where its event queue lies
        events: u64,
        /// log2 of the entries of the event queue
        events_log: u32,
        /// [`crate::board::VERSION`] of the board
        version: u32,
        /// Cells of its doorbell page
        cells: u32,
        /// Reserved: 0
        reserved: u32,
    }
    /// A command: [`crate::board::CommandHead`], then its body, over which the answer is written
    "starverbs_command" Command {
        /// The command, [`crate::board::COMMAND_BYTES`] of it
        words: [u64; 16],
    }
    /// A piece of queue memory
    "starverbs_queue_memory" QueueMemory {
        /// Its size: whole pages, rounded up
        bytes: u64,
        /// Where it begins
        offset: u64,
    }
    /// What is signalled when events were written
    "starverbs_eventfd" EventFd {
        /// An eventfd; -1: nothing any more
        fd: i32,
        /// Reserved: 0
        reserved: u32,
    }
}
