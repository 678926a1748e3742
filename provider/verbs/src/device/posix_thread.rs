//! A thread of this library's own, which may fail to start.
//!
//! The standard library's `spawn` ends the process where memory is short; pthread_create(3) says so. Owns the
//! thread until it is waited for; it must not know what the thread does.

use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use crate::error::{Result, VerbsError};

/// A running thread, or one that has ended and was not waited for.
pub(crate) struct Thread(libc::pthread_t);

/// What a thread runs.
type Work = Box<dyn FnOnce() + Send>;

impl Thread {
    /// Starts one that runs `work` with all signals blocked, on a stack of so many bytes beside what the C
    /// library takes of it (address space, of which only touched pages cost memory). A panic ends the thread
    /// and nothing else.
    ///
    /// # Errors
    /// ENOMEM, EAGAIN: no memory, or no more threads.
    pub(crate) fn start(name: &CStr, stack: usize, work: Work) -> Result<Thread> {
        let work = Box::into_raw(Box::new(work));
        let mut thread = MaybeUninit::uninit();
        let mut attr = MaybeUninit::uninit();
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the sets, the attributes and the thread are writable and filled before they are read; a new
        // thread inherits the mask, so that it blocks all signals from its first instruction on. The
        // work is the new thread's, if there is one.
        let (failed, thread) = unsafe {
            libc::pthread_attr_init(attr.as_mut_ptr());
            libc::pthread_attr_setstacksize(attr.as_mut_ptr(), stack + taken(attr.as_ptr()));
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            let failed = libc::pthread_create(thread.as_mut_ptr(), attr.as_ptr(), run, work.cast());
            libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
            libc::pthread_attr_destroy(attr.as_mut_ptr());
            (failed, thread)
        };
        if failed != 0 {
            // SAFETY: made above; no thread has it.
            drop(unsafe { Box::from_raw(work) });
            /* where the kernel has no memory for a stack, glibc says that one may try again */
            return Err(if failed == libc::EAGAIN {
                VerbsError::NoMemory("a thread")
            } else {
                VerbsError::Os(failed)
            });
        }
        // SAFETY: pthread_create filled it; the name is short and ends with a NUL.
        unsafe {
            let thread = thread.assume_init();
            libc::pthread_setname_np(thread, name.as_ptr());
            Ok(Thread(thread))
        }
    }

    /// Whether the caller is the thread itself.
    pub(crate) fn is_caller(&self) -> bool {
        // SAFETY: takes numbers; not waited for yet, so the number stands for this thread.
        unsafe { libc::pthread_equal(libc::pthread_self(), self.0) != 0 }
    }

    /// The clock of the CPU time that it takes.
    pub(crate) fn cpu_clock(&self) -> Option<libc::clockid_t> {
        let mut clock = 0;
        // SAFETY: not waited for yet, so the number stands for this thread; the clock is writable.
        let failed = unsafe { libc::pthread_getcpuclockid(self.0, &raw mut clock) };
        (failed == 0).then_some(clock)
    }

    /// Waits for its end.
    pub(crate) fn join(self) {
        // SAFETY: waited for once, as this takes the value; not by itself, as the caller has looked.
        unsafe { libc::pthread_join(self.0, ptr::null_mut()) };
    }

    /// Lets it end unseen.
    pub(crate) fn detach(self) {
        // SAFETY: neither waited for nor detached before, as this takes the value.
        unsafe { libc::pthread_detach(self.0) };
    }
}

/// What the C library takes of a thread's stack for itself, bytes: glibc puts the thread-local variables of
/// the program and its libraries there, as many as they have. 0 where it is not known.
fn taken(attr: *const libc::pthread_attr_t) -> usize {
    type Minimum = unsafe extern "C" fn(*const libc::pthread_attr_t) -> libc::size_t;
    // SAFETY: a name that ends with a NUL.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__pthread_get_minstack".as_ptr()) };
    // SAFETY: glibc's function of this name, if there is one, is of this type; a null pointer is no function.
    let minimum = unsafe { std::mem::transmute::<*mut c_void, Option<Minimum>>(found) };
    // SAFETY: attributes that are set up.
    minimum.map_or(0, |minimum| unsafe { minimum(attr) })
}

extern "C" fn run(work: *mut c_void) -> *mut c_void {
    // SAFETY: `start` made it, and gave it to this thread alone.
    let work = unsafe { Box::from_raw(work.cast::<Work>()) };
    /* there is nobody whom it could harm any more */
    let _ = catch_unwind(AssertUnwindSafe(*work));
    ptr::null_mut()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STACK: usize = 256 << 10;
    use std::cell::Cell;
    use std::sync::mpsc;

    thread_local! {
        /// More than the stack, in every thread of this program
        static MUCH: Cell<[u8; STACK + (64 << 10)]> = const { Cell::new([0; STACK + (64 << 10)]) };
    }

    #[test]
    fn thread_local_variables_take_nothing_of_its_stack() {
        let (sender, receiver) = mpsc::channel();
        let address = |cell: &Cell<_>| cell.as_ptr() as usize;
        let work = move || {
            let mut stack = [1u8; STACK / 2];
            std::hint::black_box(&mut stack);
            sender.send(MUCH.with(address)).unwrap();
        };
        let thread = Thread::start(c"test", STACK, Box::new(work)).expect("there is memory");
        assert_ne!(receiver.recv(), Ok(MUCH.with(address)));
        thread.join();
    }

    #[test]
    fn it_runs_and_may_panic() {
        let (sender, receiver) = mpsc::channel();
        let work = move || {
            sender.send(1).unwrap();
            panic!("expected by the test");
        };
        let thread = Thread::start(c"test", STACK, Box::new(work)).unwrap();
        assert!(!thread.is_caller());
        assert_eq!(receiver.recv(), Ok(1));
        thread.join();
    }
}
