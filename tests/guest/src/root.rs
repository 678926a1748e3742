//! A root folder with a newer Debian than this host's.

use std::path::Path;
use std::process::Command;

use starverbs_conformance::command::output;

/// The suite whose QEMU has vfio-user devices.
const SUITE: &str = "forky";

/// Makes the folder `root` with `packages`, separated by commas, unless it is there with just these.
///
/// # Errors
/// It cannot be had, in words.
pub fn make(root: &Path, packages: &str) -> Result<(), String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/scripts/root.sh");
    output(Command::new(script).arg(root).args([SUITE, packages])).map(drop)
}
