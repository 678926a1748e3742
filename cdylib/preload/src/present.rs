//! The sysfs view of this process: found or made when a call first asks for it.
//!
//! Owns the process's hold on it, across threads and forks, and the answers about single files. Readers take
//! no lock. It must not know libc's calls.

use core::ffi::{CStr, c_int};
use std::cell::Cell;
use std::panic::catch_unwind;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

use crate::counters::LiveNumber;
use crate::path::PATH_MAX;
use crate::sysfs_view::{DEVICE_NUMBER, SysfsView};
use crate::tree::Tree;
use crate::{errno, facts};

/// The tree held last; trees live as long as the process, because readers may have any of them in hand.
static TREE: AtomicPtr<Tree> = AtomicPtr::new(null_mut());
/// The process that makes a tree just now, or 0. Not a mutex: a fork may copy it while it is taken.
static MAKER: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// This thread makes the view: its own calls see the host.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// What a file of the view is.
pub(crate) enum FileKind {
    /// The device node
    Device,
    /// A counter
    Live(LiveNumber),
    /// Another file, or a folder
    Plain,
}

/// The tree, if this process has looked at the view before.
#[inline]
pub(crate) fn peek() -> Option<&'static Tree> {
    // SAFETY: NULL, or a leaked box.
    unsafe { TREE.load(Ordering::Acquire).as_ref() }
}

/// The tree, made or found if need be; None where that fails, and calls then see the host as it is.
pub(crate) fn current() -> Option<&'static Tree> {
    if INSIDE.get() {
        return None;
    }
    errno::kept(|| match peek() {
        Some(tree) if tree.is_held() => Some(tree),
        _ => catch_unwind(refresh).ok().flatten(),
    })
}

fn refresh() -> Option<&'static Tree> {
    let making = MakerLock::take();
    let old = peek();
    if let Some(tree) = old.filter(|tree| tree.is_held()) {
        return Some(tree);
    }
    let tree = Tree::hold(&SysfsView::of(&facts::now().ok()?)).ok()?;
    TREE.store(Box::into_raw(Box::new(tree)), Ordering::Release);
    if let Some(old) = old {
        old.forget();
    }
    static AT_EXIT: AtomicBool = AtomicBool::new(false);
    if !AT_EXIT.swap(true, Ordering::Relaxed) {
        // SAFETY: the handler may run at any exit; this library is never unmapped.
        unsafe { libc::atexit(leave) };
    }
    drop(making);
    peek()
}

extern "C" fn leave() {
    let _ = catch_unwind(|| peek().map(Tree::leave));
}

/// Held by the one thread that makes the tree.
struct MakerLock;

impl MakerLock {
    fn take() -> MakerLock {
        let me = std::process::id();
        loop {
            match MAKER.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => break,
                Err(holder) if holder == me => std::thread::yield_now(),
                // The parent's thread that was at it when this process was forked; it is not here.
                Err(parent) => _ = MAKER.compare_exchange(parent, 0, Ordering::Acquire, Ordering::Relaxed),
            }
        }
        INSIDE.set(true);
        MakerLock
    }
}

impl Drop for MakerLock {
    fn drop(&mut self) {
        INSIDE.set(false);
        MAKER.store(0, Ordering::Release);
    }
}

/// What file a descriptor refers to; None if it is not in the view.
pub(crate) fn kind(tree: &Tree, fd: c_int) -> Option<FileKind> {
    // SAFETY: a stat of zeroes is valid: integers.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // The kernel's answer, because `calls::stat` would show the device node.
    // SAFETY: fstat fills the struct, which lives across the call.
    let done = unsafe { libc::syscall(libc::SYS_fstat, fd, &raw mut stat) };
    if done != 0 || stat.st_dev != tree.device() {
        return None;
    }
    Some(match tree.live(stat.st_ino) {
        _ if stat.st_ino == tree.node => FileKind::Device,
        Some(live) => FileKind::Live(live),
        None => FileKind::Plain,
    })
}

/// Puts a file with the counter's value, as it is now, behind the descriptor. Leaves it as it was where that
/// fails.
pub(crate) fn show_value(live: &LiveNumber, fd: c_int, flags: c_int) {
    let shown = || {
        let text = format!("{}\n", facts::value(live));
        // SAFETY: the name is a C string, the text lives across the call, and the new descriptor is closed
        // once.
        unsafe {
            let file = libc::memfd_create(c"starverbs-counter".as_ptr(), libc::MFD_CLOEXEC);
            if file < 0 {
                return;
            }
            if libc::write(file, text.as_ptr().cast(), text.len()) > 0
                && libc::lseek(file, 0, libc::SEEK_SET) == 0
            {
                libc::dup3(file, fd, flags & libc::O_CLOEXEC);
            }
            libc::close(file);
        }
    };
    errno::kept(|| _ = catch_unwind(shown));
}

/// Mode bits of the device node.
const NODE_MODE: u32 = libc::S_IFCHR | 0o666;

/// Makes what stat(2) said of the file behind the device node what it says of the node.
#[inline]
pub(crate) fn correct(stat: &mut libc::stat) {
    if peek().is_some_and(|tree| tree.node == stat.st_ino && tree.device() == stat.st_dev) {
        stat.st_mode = NODE_MODE;
        stat.st_rdev = libc::makedev(DEVICE_NUMBER.0, DEVICE_NUMBER.1);
        (stat.st_uid, stat.st_gid) = (0, 0);
    }
}

/// As [`correct`], for statx(2).
#[inline]
pub(crate) fn correct_extended(stat: &mut libc::statx) {
    let device = || libc::makedev(stat.stx_dev_major, stat.stx_dev_minor);
    if peek().is_some_and(|tree| tree.node == stat.stx_ino && tree.device() == device()) {
        stat.stx_mode = NODE_MODE as u16;
        (stat.stx_rdev_major, stat.stx_rdev_minor) = DEVICE_NUMBER;
        (stat.stx_uid, stat.stx_gid) = (0, 0);
    }
}

/// The folder of the view, for taking it off paths that libc gives.
#[inline]
pub(crate) fn root() -> Option<&'static CStr> {
    peek().map(|tree| tree.root.as_c_str())
}

/// Joins the view at the start of a process whose working directory lies in it, as a shell's child's may.
pub(crate) fn start() {
    let mark = crate::tree::PREFIX.as_bytes();
    if here(&mut [0; PATH_MAX]).windows(mark.len()).any(|part| part == mark) {
        let _ = current();
    }
}

/// Gives the view back before another program takes this process's place; unless its working directory
/// lies there, which the other program then looks after. Should this one stay, it finds or makes the view
/// anew. Does nothing in a forked child, which holds none.
pub(crate) fn give_back() {
    let Some(tree) = peek() else { return };
    let given = || {
        if tree.is_held() && !here(&mut [0; PATH_MAX]).starts_with(tree.root.to_bytes()) {
            tree.leave();
            tree.forget();
        }
    };
    errno::kept(|| _ = catch_unwind(given));
}

/// The working directory as the kernel names it; empty if it has no name.
fn here(room: &mut [u8; PATH_MAX]) -> &[u8] {
    // SAFETY: the call writes at most that many bytes.
    let length = unsafe { libc::syscall(libc::SYS_getcwd, room.as_mut_ptr(), room.len()) };
    room.get(..usize::try_from(length).unwrap_or(0)).unwrap_or_default()
}
