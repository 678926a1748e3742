//! Forked children and the card's sockets. A file of its own, as a child has for a moment what any test
//! holds.

use std::io::ErrorKind;
use std::time::Duration;

use starverbs_backend::{QpnBlock, ask, let_go};

/// A UDP port that no other test uses.
const PORT: u16 = 65003;

/// Whether some process holds the name of a block.
fn is_owned(block: u32) -> bool {
    let answer = ask(PORT, block, b"", Duration::from_millis(1));
    answer.map_or_else(|error| error.kind() != ErrorKind::ConnectionRefused, |_| true)
}

/// A name is free when the parent has closed it, whatever its child does: the parent's peers notice its end.
#[test]
fn a_child_holds_no_name() {
    let block = QpnBlock::claim(PORT).expect("a free block");
    let number = block.number();
    let mut ends = [0; 2];
    // SAFETY: room for two descriptors.
    assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    // SAFETY: the child makes async-signal-safe calls alone, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let_go();
        let byte = 0u8;
        // SAFETY: descriptors of this process, and one byte: it says that it let go, and waits for the
        // parent.
        unsafe {
            libc::write(ends[1], (&raw const byte).cast(), 1);
            libc::close(ends[1]);
            libc::pause();
            libc::_exit(0);
        }
    }
    let mut byte = 0u8;
    // SAFETY: one byte of room.
    assert_eq!(unsafe { libc::read(ends[0], (&raw mut byte).cast(), 1) }, 1);
    assert!(is_owned(number), "the parent has it");
    drop(block);
    let kept = is_owned(number);
    // SAFETY: the child of this test, which waits for a signal.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
        libc::close(ends[0]);
        libc::close(ends[1]);
    }
    assert!(!kept, "the child kept the name");
}
