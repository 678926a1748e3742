//! fork(2): the child has a copy of the arena before anything of it runs, and the parent waits for that.
//!
//! By pthread_atfork(3), so daemon(3) and forkpty(3) are served too. These handlers are registered before all
//! others: the locks that others take before a fork are held while the child copies, and what
//! those guard is whole. vfork(2) and posix_spawn(3) share the parent's memory and need nothing. After
//! _Fork(3) and clone(2) a child has no arena at all: it dies where it touches one, and does no harm.
//!
//! Between the fork and the first handler glibc itself sets free what it locked: streams and threads'
//! descriptions, which may lie in the arena. So a fault in the child means that it is time for the copy.

use core::cell::UnsafeCell;
use core::ffi::{c_int, c_void};
use core::mem::{MaybeUninit, zeroed};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use crate::child::Legacy;
use crate::say::say;
use crate::{arena, errno, system};

/// What parent and child know of the fork that is under way. Touched by who holds the arena's lock.
struct Under {
    /// Where the child says that it is done; None: the arena is not live, or there are no descriptors
    pipe: Option<(c_int, c_int)>,
    legacy: Legacy,
    /// What a fault did before
    before: MaybeUninit<libc::sigaction>,
}

struct Guarded(UnsafeCell<Under>);

// SAFETY: touched by the thread that holds the arena's lock, or by the only thread of its child.
unsafe impl Sync for Guarded {}

static UNDER: Guarded =
    Guarded(UnsafeCell::new(Under { pipe: None, legacy: Legacy::none(), before: MaybeUninit::uninit() }));
/// The process that forks just now, or 0
static PARENT: AtomicI32 = AtomicI32::new(0);

unsafe extern "C" {
    fn pthread_atfork(
        before: Option<extern "C" fn()>,
        in_parent: Option<extern "C" fn()>,
        in_child: Option<extern "C" fn()>,
    ) -> c_int;
}

/// Registers the handlers, once.
pub(crate) fn register() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if !DONE.swap(true, Ordering::AcqRel) {
        // SAFETY: the handlers may run at any fork; this library is never unmapped.
        unsafe { pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    }
}

fn own_pid() -> c_int {
    // SAFETY: no pointers.
    unsafe { libc::syscall(libc::SYS_getpid) as c_int }
}

extern "C" fn before() {
    // A frozen arena's books must be whole in the child, too.
    arena::books().hold();
    if !arena::is_live() {
        return;
    }
    // SAFETY: this thread holds the lock.
    let (under, books) = unsafe { (&mut *UNDER.0.get(), arena::books().held()) };
    errno::kept(|| {
        under.pipe = arena::file(books).and_then(|_| system::pipe().ok());
        under.legacy = Legacy::of(books);
        // SAFETY: a sigaction of zeroes is valid; both live across the call.
        unsafe {
            let mut action: libc::sigaction = zeroed();
            action.sa_sigaction = on_fault as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
            libc::sigaction(libc::SIGSEGV, &action, under.before.as_mut_ptr());
        }
        PARENT.store(own_pid(), Ordering::Release);
    });
}

extern "C" fn in_parent() {
    if PARENT.swap(0, Ordering::AcqRel) != 0 {
        // SAFETY: this thread has held the lock since `before`.
        let under = unsafe { &mut *UNDER.0.get() };
        errno::kept(|| {
            if let Some((from, to)) = under.pipe.take() {
                system::close(to);
                system::read_byte(from);
                system::close(from);
            }
            under.legacy = Legacy::none();
            restore(under);
        });
    }
    arena::books().let_go();
}

extern "C" fn in_child() {
    become_private();
    arena::books().let_go();
}

/// Puts back what a fault did.
fn restore(under: &Under) {
    // SAFETY: `before` has filled it.
    unsafe { libc::sigaction(libc::SIGSEGV, under.before.as_ptr(), null_mut()) };
}

/// In the child, once: copies the arena, and has the parent go on. Ends the child if it cannot: it must not
/// run without its memory.
fn become_private() {
    if PARENT.swap(0, Ordering::AcqRel) == 0 {
        return;
    }
    // SAFETY: this is the child's only thread, and its parent's held the lock.
    let (under, books) = unsafe { (&mut *UNDER.0.get(), arena::books().held()) };
    errno::kept(|| {
        restore(under);
        let Some(((from, to), file)) = under.pipe.take().zip(arena::file(books)) else {
            give_up("there are no descriptors to copy its parent's memory with", libc::EMFILE);
        };
        system::close(from);
        if let Err(error) = under.legacy.copy(file) {
            give_up("there is no memory for a copy of its parent's", error.raw_os_error().unwrap_or(0));
        }
        under.legacy = Legacy::none();
        arena::freeze();
        system::write(to, &[1]);
        system::close(to);
    });
}

fn give_up(why: &str, error: c_int) -> ! {
    say(format_args!("a forked child ends: {why} ({})", std::io::Error::from_raw_os_error(error)));
    // SAFETY: ends the process without its exit handlers.
    unsafe {
        libc::syscall(libc::SYS_exit_group, 1);
    }
    std::process::abort()
}

/// A fault while a fork is under way: in the child, of what it does not have yet.
extern "C" fn on_fault(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel gives a description of the fault.
    let address = unsafe { (*info).si_addr() } as usize;
    let parent = PARENT.load(Ordering::Acquire);
    if parent != 0 && parent != own_pid() && arena::has(address) {
        become_private();
    } else {
        // The program's own: it comes again, and finds what it would have found.
        // SAFETY: `before` has filled it; another thread's fault may read it at the same time.
        unsafe { libc::sigaction(libc::SIGSEGV, (*UNDER.0.get()).before.as_ptr(), null_mut()) };
    }
}

/// Whether the calling thread's stack lies in the arena, so that a child could not begin there.
pub(crate) fn stack_is_shared() -> bool {
    let here = 0u8;
    arena::is_live() && arena::has(&raw const here as usize)
}
