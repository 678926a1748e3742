//! Other programs in this process: what exec(3) replaces does not come to its exit handlers, so it gives the
//! view back here. Not execl(3) and its kin: Rust cannot define a call with any number of arguments, and
//! in glibc they do not pass by here either. After those the lock is free, but the folder stays for the
//! user's next process.

use core::ffi::{c_char, c_int};

use super::{go_on, interpose};
use crate::present;

/// A list of strings that ends with NULL.
type Strings = *const *const c_char;

interpose! {
    /// execve(2)
    [execve] (path: *const c_char, arguments: Strings, variables: Strings) -> c_int {
        present::give_back();
        go_on!(execve(path, arguments, variables) or -1)
    }
    /// execv(3)
    [execv] (path: *const c_char, arguments: Strings) -> c_int {
        present::give_back();
        go_on!(execv(path, arguments) or -1)
    }
    /// execvp(3)
    [execvp] (file: *const c_char, arguments: Strings) -> c_int {
        present::give_back();
        go_on!(execvp(file, arguments) or -1)
    }
    /// execvpe(3)
    [execvpe] (file: *const c_char, arguments: Strings, variables: Strings) -> c_int {
        present::give_back();
        go_on!(execvpe(file, arguments, variables) or -1)
    }
    /// fexecve(3)
    [fexecve] (fd: c_int, arguments: Strings, variables: Strings) -> c_int {
        present::give_back();
        go_on!(fexecve(fd, arguments, variables) or -1)
    }
    /// execveat(2)
    [execveat] (
        folder: c_int, path: *const c_char, arguments: Strings, variables: Strings, flags: c_int,
    ) -> c_int {
        present::give_back();
        go_on!(execveat(folder, path, arguments, variables, flags) or -1)
    }
}
