//! An oracle for the paths that programs ask for below libstarverbs.so.

use std::ffi::CString;

/// The preloaded library's own module: that library exports C symbols alone.
#[path = "../../../cdylib/preload/src/path.rs"]
#[allow(dead_code, unreachable_pub)]
mod path;

/// A path: below the view's folder it is longer by the folder's name, and comes back from there as it was.
/// One in the view names it with its first parts.
pub fn path(bytes: &[u8]) {
    let bytes: Vec<u8> = bytes.iter().copied().take_while(|byte| *byte != 0).collect();
    let Ok(path) = CString::new(bytes) else { return };
    // SAFETY: a string.
    let ours = unsafe { path::is_ours(path.as_ptr()) };
    // SAFETY: a string.
    let relative = unsafe { path::is_relative(path.as_ptr()) };
    assert!(!(ours && relative), "nothing relative is ours");
    let mut room = [0; path::PATH_MAX];
    let root = c"/dev/shm/starverbs-sysfs";
    let Some(below) = path::below(root, &path, &mut room) else {
        assert!(root.to_bytes().len() + path.to_bytes_with_nul().len() > path::PATH_MAX);
        return;
    };
    let mut back = below.to_bytes_with_nul().to_vec();
    let length = path::strip(root, &mut back);
    if !relative {
        assert_eq!(&back[..length], path.to_bytes_with_nul());
    }
}
