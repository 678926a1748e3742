//! Which paths are in the sysfs view, and where they lie below its folder.
//!
//! Owns the recognition of paths and the change of strings. No call here allocates or takes a lock.

use core::ffi::{CStr, c_char};

/// Longest path of libc, with its NUL.
pub(crate) const PATH_MAX: usize = libc::PATH_MAX as usize;

/// Where a path leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Leads {
    /// Into the view: /dev/infiniband, /sys/class/infiniband*, or the folder that the links there lead to
    Inside,
    /// Into the view and out of it again: the kernel has no such folders and cannot go there
    Through,
    Elsewhere,
}

/// Where an absolute path leads; one that is not is elsewhere.
///
/// # Safety
/// `path` is NULL or a NUL-terminated string.
#[inline]
pub(crate) unsafe fn leads(path: *const c_char) -> Leads {
    // SAFETY: by contract a string; the second byte is read only where the first is no NUL.
    unsafe {
        // Nearly all paths end here.
        if path.is_null()
            || *path != b'/' as c_char
            || !matches!(*path.add(1) as u8, b's' | b'd' | b'/' | b'.')
        {
            return Leads::Elsewhere;
        }
        walk(CStr::from_ptr(path).to_bytes()).0
    }
}

/// Whether a path is in the view.
///
/// # Safety
/// As of [`leads`].
#[inline]
pub(crate) unsafe fn is_ours(path: *const c_char) -> bool {
    // SAFETY: the caller's terms.
    unsafe { leads(path) == Leads::Inside }
}

/// Where an absolute path leads, and if through the view, where it leaves it and how long it is until
/// then.
fn walk(path: &[u8]) -> (Leads, Option<(PathPosition<'_>, usize)>) {
    let mut at = PathPosition { first: [b""; 4], depth: 0 };
    let (mut left, mut length) = (None, 0);
    for part in path.split(|byte| *byte == b'/') {
        length += part.len() + 1;
        if part.is_empty() || part == b"." {
            continue;
        }
        let was_inside = at.is_inside();
        let goes_on = at.go(part);
        if was_inside && !at.is_inside() {
            left = Some((at, length - 1));
        }
        if !goes_on {
            break;
        }
    }
    match left {
        _ if at.is_inside() => (Leads::Inside, None),
        None => (Leads::Elsewhere, None),
        Some(_) => (Leads::Through, left),
    }
}

/// Writes where a path that leads through the view comes to without it into `room`; None if it is no such
/// path, or does not fit.
pub(crate) fn around<'a>(path: &CStr, room: &'a mut [u8; PATH_MAX]) -> Option<&'a CStr> {
    let path = path.to_bytes();
    let (place, length) = walk(path).1?;
    let mut end = 0;
    for part in place.first.get(..place.depth)?.iter().copied().chain([path.get(length..)?]) {
        let slash = usize::from(part.first() != Some(&b'/'));
        room.get_mut(end..end + slash)?.fill(b'/');
        end += slash;
        room.get_mut(end..end + part.len())?.copy_from_slice(part);
        end += part.len();
    }
    *room.get_mut(end)? = 0;
    CStr::from_bytes_with_nul(room.get(..=end)?).ok()
}

/// Where a path has come to. Links of the view count as folders, but for those to the device.
#[derive(Clone, Copy)]
struct PathPosition<'a> {
    /// Its first names, as far as `depth` goes
    first: [&'a [u8]; 4],
    /// How many names it has
    depth: usize,
}

impl<'a> PathPosition<'a> {
    /// Where the links in the folders of classes lead: to devices/virtual/starverbs/CARD/CLASS/NAME.
    const LINKED: PathPosition<'static> =
        PathPosition { first: [b"sys", b"devices", b"virtual", b"starverbs"], depth: 7 };

    /// Goes to the next part of the path; false if that is not in the view and cannot come to it.
    fn go(&mut self, part: &'a [u8]) -> bool {
        if part == b".." {
            let was_inside = self.is_inside();
            self.depth = self.depth.saturating_sub(1);
            return was_inside;
        }
        if let Some(name) = self.first.get_mut(self.depth) {
            *name = part;
        }
        self.depth += 1;
        let inside = self.is_inside();
        if inside && self.depth == self.first.len() && self.first.starts_with(&[b"sys", b"class"]) {
            *self = PathPosition::LINKED;
        }
        inside || self.depth < self.first.len()
    }

    fn is_inside(&self) -> bool {
        match self.first.get(..self.depth).unwrap_or(&self.first) {
            [b"dev", b"infiniband", ..] => true,
            [b"sys", b"class", class, ..] => class.starts_with(b"infiniband"),
            first => first == PathPosition::LINKED.first,
        }
    }
}

/// Whether a path is taken from a descriptor or the working directory.
///
/// # Safety
/// `path` is NULL or a NUL-terminated string.
#[inline]
pub(crate) unsafe fn is_relative(path: *const c_char) -> bool {
    // SAFETY: by contract a string.
    !path.is_null() && unsafe { *path } != b'/' as c_char
}

/// Writes `path` below `root` into `room`; None if it does not fit.
pub(crate) fn below<'a>(root: &CStr, path: &CStr, room: &'a mut [u8; PATH_MAX]) -> Option<&'a CStr> {
    let (root, path) = (root.to_bytes(), path.to_bytes_with_nul());
    let end = root.len().checked_add(path.len())?;
    room.get_mut(..root.len())?.copy_from_slice(root);
    room.get_mut(root.len()..end)?.copy_from_slice(path);
    CStr::from_bytes_with_nul(room.get(..end)?).ok()
}

/// Takes `root` off the front of a path in place, if it lies below; gives the path's new length.
pub(crate) fn strip(root: &CStr, path: &mut [u8]) -> usize {
    let root = root.to_bytes();
    match path.strip_prefix(root) {
        Some(rest) if rest.first() == Some(&b'/') => {
            path.copy_within(root.len().., 0);
            path.len() - root.len()
        }
        _ => path.len(),
    }
}

/// As [`strip`], for a C string.
///
/// # Safety
/// `path` is NULL or a NUL-terminated string that may be written.
pub(crate) unsafe fn strip_string(root: &CStr, path: *mut c_char) {
    if path.is_null() {
        return;
    }
    // SAFETY: by contract a string; it only becomes shorter, and the NUL moves with it.
    unsafe {
        let length = CStr::from_ptr(path).to_bytes_with_nul().len();
        strip(root, core::slice::from_raw_parts_mut(path.cast::<u8>(), length));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ours(path: &CStr) -> bool {
        // SAFETY: a string.
        unsafe { is_ours(path.as_ptr()) }
    }

    #[test]
    fn the_devices_folders_are_recognised() {
        for path in [
            c"/sys/class/infiniband",
            c"/sys/class/infiniband/star0/ports",
            c"/sys//class/./infiniband_verbs/",
            c"//dev/infiniband/uverbs0",
            c"/sys/class/infiniband_mad/abi_version",
            c"/sys/devices/virtual/starverbs/card0",
            c"/dev/infiniband/../infiniband/uverbs0",
            c"/sys/class/infiniband/../infiniband_verbs/uverbs0",
            c"/sys/class/infiniband/star0/../../vendor",
            c"/sys/class/infiniband/star0/ports/1/gids/../../../device",
        ] {
            assert!(ours(path), "{path:?}");
        }
        for path in [
            c"",
            c"/",
            c"sys/class/infiniband",
            c"/sys/class/net",
            c"/dev/inf",
            c"/sys/devices/virtual/net",
            c"/srv",
            c"/dev/shm/../infiniband/x",
            c"/dev/infiniband/..",
            c"/dev/infiniband/../shm/x",
            c"/dev/infiniband/uverbs0/../../null",
            c"/sys/class/infiniband/../net/eth0",
            c"/sys/class/infiniband/../../../etc",
            c"/sys/devices/virtual/starverbs/../net/lo",
            c"/sys/class/infiniband/star0/../../../../net/lo",
        ] {
            assert!(!ours(path), "{path:?}");
        }
        // SAFETY: NULL is allowed.
        assert!(!unsafe { is_ours(core::ptr::null()) });
    }

    #[test]
    fn paths_through_the_view_come_out_where_it_stands() {
        let out = |path: &CStr| {
            let mut room = [0; PATH_MAX];
            around(path, &mut room).map(|path| path.to_owned())
        };
        for (path, to) in [
            (c"/dev/infiniband/..", c"/dev/"),
            (c"/dev/infiniband/../shm/x", c"/dev/shm/x"),
            (c"/dev/infiniband/uverbs0/../../null", c"/dev/null"),
            (c"/sys/class/infiniband/../net/eth0", c"/sys/class/net/eth0"),
            (c"//sys/./class/infiniband/star0/../../../../net/lo", c"/sys/devices/virtual/net/lo"),
            (c"/sys/class/infiniband/../../../etc", c"/sys/class/../../etc"),
        ] {
            assert_eq!(out(path).as_deref(), Some(to), "{path:?}");
            // SAFETY: a string.
            assert_eq!(unsafe { leads(path.as_ptr()) }, Leads::Through, "{path:?}");
        }
        for path in [c"/dev", c"/dev/infiniband", c"/dev/infiniband/../infiniband/uverbs0", c"/srv/.."] {
            assert_eq!(out(path), None, "{path:?}");
        }
    }

    #[test]
    fn paths_go_below_the_root_and_back() {
        let mut room = [0; PATH_MAX];
        let path = below(c"/tmp/x", c"/dev/infiniband", &mut room);
        assert_eq!(path, Some(c"/tmp/x/dev/infiniband"));
        let mut text = *b"/tmp/x/dev/infiniband\0";
        let left = strip(c"/tmp/x", &mut text);
        assert_eq!(&text[..left], b"/dev/infiniband\0");
        let mut other = *b"/tmp/xy/dev";
        assert_eq!(strip(c"/tmp/x", &mut other), other.len());
        let long = vec![b'a'; PATH_MAX];
        let long = std::ffi::CString::new(long).unwrap_or_default();
        assert!(below(c"/tmp/x", &long, &mut room).is_none());
    }
}
