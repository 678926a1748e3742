//! rsockets (rsocket(7)): not offered. A program that asks for one gets EOPNOTSUPP, and may take a plain
//! socket.

use crate::edge::set_errno;

/// For each of them: -1 of any length, EOPNOTSUPP. Looks at no argument.
pub(crate) extern "C" fn not_offered() -> isize {
    set_errno(libc::EOPNOTSUPP);
    -1
}
