//! malloc(3) and its kin: large blocks, and those that begin at a page, are ranges of the arena; all others
//! are glibc's.

use core::ffi::{c_int, c_void};
use core::ptr::{copy_nonoverlapping, null_mut, write_bytes};

use super::interpose;
use crate::arena::{self, LARGE};
use crate::ranges::Span;
use crate::{errno, next, system};

type Block = *mut c_void;

/// A block of the arena, with zeroes in its first `zeroed` bytes. None: glibc is to be asked.
fn block(size: usize, align: usize, zeroed: usize) -> Option<Block> {
    if !arena::serves() {
        return None;
    }
    let len = system::pages(size.max(1))?;
    let (span, used) = errno::kept(|| {
        arena::books().with(|books| {
            let (span, used) = books.space.take_block(len, align.max(system::page()))?;
            if !used && !books.reach(&span) {
                books.space.forget_block(span.start);
                return None;
            }
            Some((span, used))
        })
    })?;
    let block = span.start as Block;
    if used && zeroed > 0 {
        // SAFETY: the block has so many bytes, and nobody else has it.
        unsafe { write_bytes(block.cast::<u8>(), 0, zeroed) };
    }
    Some(block)
}

/// The arena's block that begins there; None: it is another's.
fn find(block: Block) -> Option<Span> {
    if !arena::has(block as usize) {
        return None;
    }
    arena::books().with(|books| books.space.block(block as usize))
}

/// Gives a block of the arena back; false: it is another's. A forked child's is private memory.
#[cold]
fn release(block: Block) -> bool {
    let live = arena::is_live();
    errno::kept(|| {
        let excess = arena::books().with(|books| {
            let span = books.space.forget_block(block as usize)?;
            Some(if live { books.space.keep(span) } else { vec![span] })
        });
        let Some(excess) = excess else { return false };
        for span in excess {
            if live {
                arena::give_back(span);
            } else {
                // SAFETY: the block is the caller's no more.
                let _ = unsafe { system::unmap(&span) };
            }
        }
        true
    })
}

/// Gives a block of the arena another size where it lies; false if it cannot.
fn resize(block: Block, old: &Span, size: usize) -> bool {
    let Some(len) = system::pages(size.max(1)) else { return false };
    if len == old.len() {
        return true;
    }
    if !arena::is_live() {
        return len < old.len();
    }
    let rest = arena::books().with(|books| {
        let rest = books.space.resize_block(block as usize, len)?;
        let grown = old.end..block as usize + len;
        if !grown.is_empty() && !books.reach(&grown) {
            books.space.resize_block(block as usize, old.len());
            return None;
        }
        Some(rest)
    });
    rest.map(arena::give_back).is_some()
}

/// glibc's block, or the next allocator's.
unsafe fn others_malloc(size: usize) -> Block {
    // SAFETY: any size.
    unsafe {
        match next::other(next::malloc) {
            Some(malloc) => malloc(size),
            _ => next::__libc_malloc(size),
        }
    }
}

unsafe fn others_memalign(align: usize, size: usize) -> Block {
    // SAFETY: any numbers.
    unsafe {
        match next::other(next::memalign) {
            Some(memalign) => memalign(align, size),
            _ => next::__libc_memalign(align, size),
        }
    }
}

/// Bytes of a block that is not the arena's.
unsafe fn others_size(block: Block) -> usize {
    // SAFETY: the caller's block, or NULL.
    unsafe { next::malloc_usable_size().map_or(0, |size| size(block)) }
}

/// What malloc gives for a large size.
#[cold]
unsafe fn large(size: usize) -> Block {
    let served = if next::is_glibc() && size >= LARGE { block(size, 1, 0) } else { None };
    // SAFETY: any size.
    served.unwrap_or_else(|| unsafe { others_malloc(size) })
}

#[cold]
unsafe fn large_zeroed(count: usize, size: usize) -> Block {
    let served = match count.checked_mul(size) {
        Some(all) if next::is_glibc() && all >= LARGE => block(all, 1, all),
        _ => None,
    };
    // SAFETY: any numbers.
    served.unwrap_or_else(|| unsafe {
        match next::other(next::calloc) {
            Some(calloc) => calloc(count, size),
            _ => next::__libc_calloc(count, size),
        }
    })
}

unsafe fn aligned(align: usize, size: usize) -> Block {
    let served = match align.checked_next_power_of_two() {
        Some(align) if next::is_glibc() && (align >= system::page() || size >= LARGE) => {
            block(size, align, 0)
        }
        _ => None,
    };
    // SAFETY: any numbers.
    served.unwrap_or_else(|| unsafe { others_memalign(align, size) })
}

/// realloc where the arena has the block, or is to have it.
#[cold]
unsafe fn moved(old: Block, size: usize) -> Block {
    // SAFETY: libc's terms.
    unsafe {
        let span = find(old);
        let from_others = span.is_none();
        if from_others && (old.is_null() || !next::is_glibc() || size < LARGE) {
            return match next::other(next::realloc) {
                Some(realloc) => realloc(old, size),
                _ => next::__libc_realloc(old, size),
            };
        }
        if size == 0 {
            free(old);
            return null_mut();
        }
        if span.as_ref().is_some_and(|span| resize(old, span, size)) {
            return old;
        }
        let has = span.as_ref().map_or_else(|| others_size(old), Span::len);
        let to = malloc(size);
        if !to.is_null() {
            copy_nonoverlapping(old.cast::<u8>(), to.cast::<u8>(), has.min(size));
            free(old);
        }
        to
    }
}

interpose! {
    /// malloc(3)
    [malloc] (size: usize) -> Block {
        if size < LARGE && next::is_glibc() {
            return next::__libc_malloc(size);
        }
        large(size)
    }
    /// calloc(3)
    [calloc] (count: usize, size: usize) -> Block {
        if count < LARGE && size < LARGE && count * size < LARGE && next::is_glibc() {
            return next::__libc_calloc(count, size);
        }
        large_zeroed(count, size)
    }
    /// realloc(3)
    [realloc] (old: Block, size: usize) -> Block {
        if old.is_null() {
            return malloc(size);
        }
        if size < LARGE && !arena::has(old as usize) && next::is_glibc() {
            return next::__libc_realloc(old, size);
        }
        moved(old, size)
    }
    /// reallocarray(3)
    [reallocarray] (old: Block, count: usize, size: usize) -> Block {
        match count.checked_mul(size) {
            Some(all) => realloc(old, all),
            None => {
                errno::set(libc::ENOMEM);
                null_mut()
            }
        }
    }
    /// free(3)
    [free] (block: Block) -> () {
        if arena::has(block as usize) && release(block) {
            return;
        }
        match next::other(next::free) {
            Some(free) => free(block),
            _ => next::__libc_free(block),
        }
    }
    /// memalign(3)
    [memalign] (align: usize, size: usize) -> Block { aligned(align, size) }
    /// aligned_alloc(3)
    [aligned_alloc] (align: usize, size: usize) -> Block { aligned(align, size) }
    /// posix_memalign(3)
    [posix_memalign] (to: *mut Block, align: usize, size: usize) -> c_int {
        if !align.is_power_of_two() || !align.is_multiple_of(size_of::<Block>()) {
            return libc::EINVAL;
        }
        let block = errno::kept(|| aligned(align, size));
        if block.is_null() {
            return libc::ENOMEM;
        }
        *to = block;
        0
    }
    /// valloc(3)
    [valloc] (size: usize) -> Block { aligned(system::page(), size) }
    /// pvalloc(3)
    [pvalloc] (size: usize) -> Block {
        match system::pages(size) {
            Some(size) => aligned(system::page(), size),
            None => {
                errno::set(libc::ENOMEM);
                null_mut()
            }
        }
    }
    /// malloc_usable_size(3)
    [malloc_usable_size] (block: Block) -> usize {
        match find(block) {
            Some(span) => span.len(),
            None => others_size(block),
        }
    }
}
