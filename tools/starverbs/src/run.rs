//! `starverbs run`: replaces itself with a program that finds the card's library instead of the system's.
//!
//! The program takes over this process, so signals, process id and exit status are the program's own.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use starverbs_settings::{Settings, Share};

use crate::Failure;

/// Status when this command itself fails, as with env(1) and nohup(1); 126 and 127 are the shell's.
const OWN_FAILURE: u8 = 125;
const CANNOT_START: u8 = 126;
const NOT_FOUND: u8 = 127;

/// Start a program on the card.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only put the library before all others (LD_PRELOAD), not its folder on the search path
    #[arg(long, conflicts_with = "library")]
    preload: bool,
    /// Only put the library's folder on the search path (LD_LIBRARY_PATH): /sys and /dev stay the host's
    #[arg(long)]
    library: bool,
    /// Hurt the wire: loss=1%,reorder=0.1%,dup=0.5%,corrupt=0.01%,delay=50us,jitter=10us,seed=7
    #[arg(long, value_name = "SPEC")]
    fault: Option<String>,
    /// Capture all frames to FILE (%p becomes the process id)
    #[arg(long, value_name = "FILE")]
    pcap: Option<String>,
    /// Bound the port's MTU: 256, 512, 1024, 2048, 4096
    #[arg(long)]
    mtu: Option<String>,
    /// Any setting by its name, with or without STARVERBS_
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// The folder that holds the libraries, if not ../lib/starverbs or ../lib from this command
    #[arg(long, value_name = "DIR")]
    lib: Option<PathBuf>,
    /// The program and its arguments
    #[arg(required = true, last = true, value_name = "CMD")]
    program: Vec<OsString>,
}

impl Args {
    /// The program and its arguments.
    #[cfg(test)]
    pub(crate) fn program(&self) -> &[OsString] {
        &self.program
    }

    /// The variables that the options stand for.
    fn variables(&self) -> Result<BTreeMap<OsString, OsString>, Failure> {
        let mut vars = BTreeMap::new();
        for pair in &self.settings {
            let (key, value) = pair
                .split_once('=')
                .ok_or_else(|| Failure::new(OWN_FAILURE, format!("--set {pair}: expected KEY=VALUE")))?;
            let key = key.to_ascii_uppercase();
            let key = key.strip_prefix("STARVERBS_").unwrap_or(&key);
            vars.insert(format!("STARVERBS_{key}").into(), value.into());
        }
        for (key, value) in [("FAULT", &self.fault), ("PCAP", &self.pcap), ("MTU", &self.mtu)] {
            if let Some(value) = value {
                vars.insert(format!("STARVERBS_{key}").into(), value.into());
            }
        }
        Ok(vars)
    }

    /// What comes first in which of the dynamic linker's lists. Both, unless one was asked for: the library
    /// that is loaded before all others shows the device in /sys and /dev too; the search path is for
    /// programs that open libibverbs.so or librdmacm.so.1 by name. Beside a loaded library they find
    /// names that lead to it: another would be a second card.
    /// What serves large allocations comes before all: it is asked first, and begins first.
    fn linking(&self, lib: &Path, share: Share) -> Vec<(&'static str, PathBuf)> {
        let preload = ("LD_PRELOAD", lib.join("libstarverbs.so"));
        let mut linking = match (self.preload, self.library) {
            (true, _) => vec![preload],
            (_, true) => vec![("LD_LIBRARY_PATH", lib.to_owned())],
            _ => vec![preload, ("LD_LIBRARY_PATH", lib.join("preload"))],
        };
        if share == Share::Malloc {
            linking.push(("LD_PRELOAD", lib.join(SHARE)));
        }
        linking
    }
}

/// Replaces this process with the program; returns only if that fails.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let mut vars = args.variables()?;
    let settings = check(&vars)?;
    let lib = library_dir(args.lib.as_deref())?;
    for (name, first) in args.linking(&lib, settings.share) {
        let rest = vars.get(OsStr::new(name)).cloned().or_else(|| std::env::var_os(name));
        vars.insert(name.into(), prepend(first.as_os_str(), rest));
    }
    let [program, arguments @ ..] = args.program.as_slice() else {
        return Err(Failure::new(OWN_FAILURE, "no program given"));
    };
    let mut command = Command::new(program);
    command.args(arguments).envs(vars);
    // Rust programs ignore SIGPIPE and main() restored it, so the program starts with the usual dispositions.
    let error = command.exec();
    let program = Path::new(program).display();
    Err(match error.kind() {
        ErrorKind::NotFound => Failure::new(NOT_FOUND, format!("{program}: command not found")),
        _ => Failure::new(CANNOT_START, format!("{program}: {error}")),
    })
}

/// Settings are checked here, because a program may swallow what the library has to say about them.
fn check(vars: &BTreeMap<OsString, OsString>) -> Result<Settings, Failure> {
    let inherited = std::env::vars_os().filter(|(name, _)| !vars.contains_key(name));
    let given = vars.iter().map(|(name, value)| (name.clone(), value.clone()));
    Settings::load_for(inherited.chain(given)).map_err(|e| Failure::new(OWN_FAILURE, e))
}

/// The libraries that the folder must have.
const LIBRARIES: [&str; 3] = ["libibverbs.so.1", "libstarverbs.so", SHARE];
/// The one that serves large allocations from shared memory.
const SHARE: &str = "libstarverbs-share.so";

/// The folder with the libraries: `given`, or where they lie beside this command: ../lib/starverbs where it
/// is installed, ../lib where it was built.
pub(crate) fn library_dir(given: Option<&Path>) -> Result<PathBuf, Failure> {
    let dir = match given {
        Some(dir) => dir.canonicalize().unwrap_or_else(|_| dir.to_owned()),
        None => beside(&std::env::current_exe().map_err(|e| Failure::new(OWN_FAILURE, e))?),
    };
    match missing(&dir) {
        None => Ok(dir),
        Some(missing) => {
            let hint = "build it with `make build`, or say where it is with --lib";
            Err(Failure::new(OWN_FAILURE, format!("{}: no {missing} here; {hint}", dir.display())))
        }
    }
}

/// The folder with the libraries of the command at `own`.
fn beside(own: &Path) -> PathBuf {
    let lib = own.ancestors().nth(2).unwrap_or(Path::new("/")).join("lib");
    // A private folder: in lib itself they would take the place of the system's libibverbs for every program.
    let installed = lib.join("starverbs");
    if missing(&installed).is_none() { installed } else { lib }
}

/// The library that `dir` lacks.
fn missing(dir: &Path) -> Option<&'static str> {
    LIBRARIES.into_iter().find(|library| !dir.join(library).exists())
}

/// `first` before the entries of `rest`, as the dynamic linker separates them.
fn prepend(first: &OsStr, rest: Option<OsString>) -> OsString {
    let mut list = first.to_owned();
    if let Some(rest) = rest.filter(|rest| !rest.is_empty()) {
        list.push(":");
        list.push(rest);
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(settings: &[&str], mtu: Option<&str>) -> Args {
        Args {
            preload: false,
            library: false,
            fault: None,
            pcap: None,
            mtu: mtu.map(Into::into),
            settings: settings.iter().map(ToString::to_string).collect(),
            lib: None,
            program: vec!["true".into()],
        }
    }

    #[test]
    fn options_become_variables() {
        let vars = args(&["gso=off", "STARVERBS_PORT=5000"], Some("512")).variables().unwrap();
        let expected = [("STARVERBS_GSO", "off"), ("STARVERBS_MTU", "512"), ("STARVERBS_PORT", "5000")];
        assert_eq!(vars, expected.map(|(k, v)| (k.into(), v.into())).into());
        assert_eq!(args(&["gso"], None).variables().unwrap_err().code, OWN_FAILURE);
    }

    #[test]
    fn bad_settings_stop_before_the_program_starts() {
        let vars = args(&["mtu=1500"], None).variables().unwrap();
        let failure = check(&vars).unwrap_err();
        assert_eq!(failure.code, OWN_FAILURE);
        assert!(failure.message.contains("STARVERBS_MTU"), "{}", failure.message);
    }

    #[test]
    fn both_ways_to_the_library_unless_one_is_asked_for() {
        let names = |preload, library| {
            let args = Args { preload, library, ..args(&[], None) };
            let linking = args.linking(Path::new("/l"), Share::Off);
            linking.into_iter().map(|(name, _)| name).collect::<Vec<_>>()
        };
        assert_eq!(names(false, false), ["LD_PRELOAD", "LD_LIBRARY_PATH"]);
        assert_eq!(names(true, false), ["LD_PRELOAD"]);
        assert_eq!(names(false, true), ["LD_LIBRARY_PATH"]);
    }

    #[test]
    fn what_serves_allocations_is_loaded_last_put_first() {
        let shares = |preload, library| {
            let args = Args { preload, library, ..args(&[], None) };
            args.linking(Path::new("/l"), Share::Malloc).pop()
        };
        let expected = Some(("LD_PRELOAD", PathBuf::from("/l/libstarverbs-share.so")));
        for (preload, library) in [(false, false), (true, false), (false, true)] {
            assert_eq!(shares(preload, library), expected);
        }
        let vars = args(&["share=malloc"], None).variables().unwrap();
        assert_eq!(check(&vars).unwrap().share, Share::Malloc);
    }

    #[test]
    fn own_library_comes_first() {
        let list = |rest: Option<&str>| prepend(OsStr::new("/a"), rest.map(Into::into));
        assert_eq!(list(None), "/a");
        assert_eq!(list(Some("")), "/a");
        assert_eq!(list(Some("/b:/c")), "/a:/b:/c");
    }

    #[test]
    fn libraries_are_found_beside_the_command() {
        let root = std::env::temp_dir().join(format!("starverbs-beside-{}", std::process::id()));
        let (own, lib) = (root.join("bin/starverbs"), root.join("lib"));
        assert_eq!(beside(&own), lib);
        std::fs::create_dir_all(lib.join("starverbs")).unwrap();
        for library in LIBRARIES {
            std::fs::write(lib.join(library), "").unwrap();
            assert_eq!(beside(&own), lib);
        }
        for library in LIBRARIES {
            assert_eq!(beside(&own), lib);
            std::fs::write(lib.join("starverbs").join(library), "").unwrap();
        }
        assert_eq!(beside(&own), lib.join("starverbs"));
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn missing_library_says_what_to_do() {
        let failure = library_dir(Some(Path::new("/nonexistent"))).unwrap_err();
        assert!(failure.message.contains("make build"), "{}", failure.message);
    }
}
