//! mmap(2), munmap(2), madvise(2): private anonymous memory is a range of the arena, and behaves as such.
//!
//! What the arena's file cannot do is translated: a shared mapping keeps its pages when told MADV_DONTNEED,
//! and has no MADV_FREE.

use core::ffi::{c_int, c_void};
use std::io;

use super::{interpose, status};
use crate::arena::{self, LARGE};
use crate::ranges::Span;
use crate::system::{self, FAILED, READ_WRITE};
use crate::{errno, next};

/// What a request may have beside these to be served: nothing. The others (stacks, huge pages, low
/// addresses, locked pages) are the kernel's business.
const WANTED: c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
const HARMLESS: c_int = libc::MAP_NORESERVE | libc::MAP_POPULATE | libc::MAP_NONBLOCK;
const FIXED: c_int = libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE;
/// Linux 5.14
const POPULATE_WRITE: c_int = 23;
const DONTNEED_LOCKED: c_int = 24;

#[derive(Clone, Copy)]
struct MapRequest {
    at: *mut c_void,
    len: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off_t,
}

impl MapRequest {
    fn is_private_memory(&self) -> bool {
        self.flags & WANTED == WANTED && self.flags & !(WANTED | HARMLESS | FIXED) == 0
    }

    /// Whether the arena is to serve it, wherever that is.
    fn is_served(&self) -> bool {
        self.len >= LARGE
            && self.flags & FIXED == 0
            && self.is_private_memory()
            && matches!(self.protection, READ_WRITE | libc::PROT_NONE)
            && (self.at.is_null() || arena::has(self.at as usize))
    }

    /// The next mmap's.
    unsafe fn go_on(self) -> *mut c_void {
        let MapRequest { at, len, protection, flags, fd, offset } = self;
        // SAFETY: libc's terms.
        unsafe {
            match next::mmap() {
                Some(mmap) => mmap(at, len, protection, flags, fd, offset),
                None => system::mmap(at, len, protection, flags, fd, offset),
            }
        }
    }
}

unsafe fn map(request: MapRequest) -> *mut c_void {
    // SAFETY: libc's terms.
    unsafe {
        if request.is_served() {
            return errno::kept(|| serve(&request)).unwrap_or_else(|| request.go_on());
        }
        let replaces = request.flags & FIXED == libc::MAP_FIXED;
        if replaces && arena::meets(request.at as usize, request.len) && arena::is_live() {
            return replace(request);
        }
        request.go_on()
    }
}

/// A range of the arena. None if there is none: the kernel is to be asked.
#[cold]
fn serve(request: &MapRequest) -> Option<*mut c_void> {
    if !arena::serves() {
        return None;
    }
    let len = system::pages(request.len)?;
    let reserved = request.protection == libc::PROT_NONE;
    // Who only reserves addresses may reserve all that there are.
    if reserved && len > arena::span().len() / 4 {
        return None;
    }
    let hint = request.at as usize;
    let span = arena::books().with(|books| {
        let wanted = hint..hint.checked_add(len)?;
        if hint != 0 && hint.is_multiple_of(system::page()) && books.space.take_at(&wanted) {
            return books.reach(&wanted).then_some(wanted);
        }
        books.take(len, system::page())
    })?;
    // SAFETY: the range is this call's.
    unsafe {
        if reserved && system::protect(&span, libc::PROT_NONE).is_err() {
            arena::give_back(span);
            return None;
        }
        if request.flags & libc::MAP_POPULATE != 0 && !reserved {
            // What cannot be had now is had when it is touched.
            let _ = system::advise(&span, POPULATE_WRITE);
        }
    }
    Some(span.start as *mut c_void)
}

/// A mapping in the place of what the program has in the arena.
#[cold]
unsafe fn replace(request: MapRequest) -> *mut c_void {
    let at = request.at as usize;
    // SAFETY: libc's terms.
    let refused = |request: MapRequest| unsafe { request.go_on() };
    let (true, Some(len)) = (at.is_multiple_of(system::page()), system::pages(request.len)) else {
        return refused(request);
    };
    let span = at..at + len;
    let inside = arena::inside(&span);
    let emptied = request.len > 0
        && inside == span
        && request.is_private_memory()
        && errno::kept(|| arena::renew(&span, request.protection));
    if emptied {
        arena::books().with(|books| books.space.regain(span));
        return request.at;
    }
    // SAFETY: libc's terms.
    let mapped = unsafe { request.go_on() };
    if mapped != FAILED {
        arena::books().with(|books| books.space.lose(inside));
    }
    mapped
}

/// Unmaps, each part by whose it is.
#[cold]
unsafe fn unmap(span: &Span) -> io::Result<()> {
    let inside = arena::inside(span);
    for outside in [span.start..inside.start, inside.end..span.end] {
        if !outside.is_empty() {
            // SAFETY: libc's terms.
            unsafe { unmap_others(outside.start as *mut c_void, outside.len()) }?;
        }
    }
    let used = arena::books().with(|books| books.space.used(&inside));
    used.into_iter().for_each(arena::give_back);
    Ok(())
}

unsafe fn unmap_others(at: *mut c_void, len: usize) -> io::Result<()> {
    match next::munmap() {
        // SAFETY: libc's terms.
        Some(munmap) if unsafe { munmap(at, len) } != 0 => Err(io::Error::last_os_error()),
        Some(_) => Ok(()),
        // SAFETY: as above.
        None => unsafe { system::unmap(&(at as usize..at as usize + len)) },
    }
}

/// Takes advice, each part by whose it is.
#[cold]
unsafe fn advise(span: &Span, advice: c_int) -> io::Result<()> {
    let inside = arena::inside(span);
    let (own, mut others) =
        arena::books().with(|books| (books.space.own(&inside), books.space.lost(&inside)));
    others.extend([span.start..inside.start, inside.end..span.end]);
    for part in others.into_iter().filter(|part| !part.is_empty()) {
        // SAFETY: libc's terms.
        unsafe { system::advise(&part, advice)? };
    }
    own.iter().try_for_each(|part| advise_own(part, advice))
}

fn advise_own(part: &Span, advice: c_int) -> io::Result<()> {
    let books = |change: fn(&mut crate::space::Space, Span)| {
        arena::books().with(|books| change(&mut books.space, part.clone()));
        Ok(())
    };
    match advice {
        // MADV_FREE lets the kernel take pages at any time: it may as well be now.
        libc::MADV_DONTNEED | libc::MADV_FREE | DONTNEED_LOCKED => arena::empty(part),
        libc::MADV_DONTFORK => books(|space, part| space.not_forked.insert(part)),
        libc::MADV_DOFORK => books(|space, part| space.not_forked.remove(part)),
        libc::MADV_WIPEONFORK => books(|space, part| space.wiped.insert(part)),
        libc::MADV_KEEPONFORK => books(|space, part| space.wiped.remove(part)),
        // SAFETY: libc's terms.
        _ => unsafe { system::advise(part, advice) },
    }
}

interpose! {
    /// mmap(2)
    [mmap, mmap64] (
        at: *mut c_void, len: usize, protection: c_int, flags: c_int, fd: c_int, offset: libc::off_t
    ) -> *mut c_void {
        map(MapRequest { at, len, protection, flags, fd, offset })
    }
    /// munmap(2)
    [munmap] (at: *mut c_void, len: usize) -> c_int {
        let whole = system::pages(len).filter(|len| *len > 0 && (at as usize).is_multiple_of(system::page()));
        match whole {
            Some(len) if arena::meets(at as usize, len) && arena::is_live() => {
                status(unmap(&(at as usize..(at as usize).saturating_add(len))))
            }
            _ => status(unmap_others(at, len)),
        }
    }
    /// madvise(2)
    [madvise] (at: *mut c_void, len: usize, advice: c_int) -> c_int {
        let start = at as usize;
        let whole = system::pages(len).filter(|len| *len > 0 && start.is_multiple_of(system::page()));
        match whole {
            Some(len) if arena::meets(start, len) && arena::is_live() => {
                status(advise(&(start..start.saturating_add(len)), advice))
            }
            _ => status(system::advise(&(start..start.saturating_add(len)), advice)),
        }
    }
}
