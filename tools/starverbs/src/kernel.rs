//! `starverbs kernel`: builds kernels of StRoM that are WebAssembly modules, says whether a card takes them,
//! and has running programs take them.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use clap::Subcommand;

use crate::users::{self, User};
use crate::{Failure, stat};

/// How long a process may take to list its kernels; to compile one.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
const CHANGE_LIMIT: Duration = Duration::from_secs(120);

/// What a list of kernels begins with.
const LIST_HEAD: &str = "pd op kernel\n";

/// Kernels that run on the card (StRoM): build your own, and change those of running programs
#[derive(clap::Args)]
#[command(after_help = "Programs load them with stardv_load_kernel(3) and stardv_load_module(3).")]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Build a module of a C file (with clang and lld) or of a Rust crate (with cargo), and check it
    Build {
        /// A C file that includes <starverbs/kernel.h>, or a folder with a Cargo.toml whose crate is a
        /// `cdylib` made with starverbs-sdk
        source: PathBuf,
        /// Where to put the module [default: the source's name with .wasm, in this folder]
        #[arg(short, long)]
        output: Option<PathBuf>,
    },
    /// Say whether a card takes these modules
    Check {
        /// Modules
        #[arg(required = true)]
        modules: Vec<PathBuf>,
    },
    /// Show what answers RPCs in running programs
    List {
        /// Only this process
        pid: Option<u32>,
    },
    /// Have a module answer an RPC op-code in a running program, in place of what answers it now
    Load {
        /// The process, of your own user
        pid: u32,
        /// The RPC op-code, such as 7 or 0x53; `any`: all that nothing else answers
        #[arg(value_parser = op_code)]
        op: u64,
        /// The module
        module: PathBuf,
        /// In this protection domain (handle of its `struct ibv_pd`) [default: the one that uses kernels]
        #[arg(long)]
        pd: Option<u32>,
    },
    /// Have nothing answer an RPC op-code in a running program any more
    Unload {
        /// The process, of your own user
        pid: u32,
        /// The RPC op-code; `any`: what answers all others
        #[arg(value_parser = op_code)]
        op: u64,
        /// In this protection domain [default: the one that uses kernels]
        #[arg(long)]
        pd: Option<u32>,
    },
}

fn op_code(text: &str) -> Result<u64, String> {
    let hex = text.strip_prefix("0x").map(|digits| u64::from_str_radix(digits, 16));
    match text {
        "any" => Ok(u64::MAX),
        _ => hex.unwrap_or_else(|| text.parse()).map_err(|error| error.to_string()),
    }
}

pub(crate) fn kernel(args: &Args) -> Result<(), Failure> {
    match &args.what {
        What::Build { source, output } => {
            let output = match output {
                Some(output) => output.clone(),
                None => default_output(source)?,
            };
            if source.is_dir() {
                build_rust(source, &output)?
            } else {
                build_c(source, &output)?
            }
            check(&output)
        }
        What::Check { modules } => modules.iter().try_for_each(|module| check(module)),
        What::List { pid } => list(*pid),
        What::Load { pid, op, module, pd } => {
            check(module)?;
            /* the process opens it, which may stand in another folder */
            let file = module.canonicalize().map_err(|error| unreadable(module, error))?;
            change(*pid, "load", (*pd, *op), file.as_os_str().as_bytes())
        }
        What::Unload { pid, op, pd } => change(*pid, "unload", (*pd, *op), b""),
    }
}

fn list(pid: Option<u32>) -> Result<(), Failure> {
    for User { pid, command, page, .. } in users::of(pid, |_| false)? {
        match users::ask(&page, b"kernels", ANSWER_LIMIT) {
            /* none, or a card that knows nothing of them */
            Ok(kernels) if kernels == LIST_HEAD || !kernels.starts_with(LIST_HEAD) => {}
            Ok(kernels) => print!("{pid} {command}\n{}", stat::aligned(&kernels)),
            Err(why) => eprintln!("{pid} {command}: {why}"),
        }
    }
    Ok(())
}

/// Has a process change what answers an op-code.
fn change(pid: u32, verb: &str, (domain, op): (Option<u32>, u64), file: &[u8]) -> Result<(), Failure> {
    let domain = domain.map_or_else(|| "-".to_owned(), |domain| domain.to_string());
    let user = users::one(pid, false)?;
    /* its own number for itself, which another PID namespace may have given */
    let mut text = format!("{verb} {} {domain} {op}", user.page.pid).into_bytes();
    if !file.is_empty() {
        text.extend([b" ", file].concat());
    }
    let failed = |why: &str| Failure::new(1, format!("process {pid}: {why}"));
    let said = users::ask(&user.page, &text, CHANGE_LIMIT).map_err(|why| failed(&why))?;
    match said.strip_prefix("error: ") {
        _ if said == "ok\n" => Ok(()),
        Some(why) => Err(failed(why.trim_end())),
        None => Err(failed("its card does not change kernels: it is a board, or of another version")),
    }
}

fn default_output(source: &Path) -> Result<PathBuf, Failure> {
    let whole = source.canonicalize().map_err(|error| unreadable(source, error))?;
    let name = whole.file_stem().ok_or_else(|| Failure::new(2, format!("{}: no name", source.display())))?;
    Ok(Path::new(name).with_extension("wasm"))
}

fn unreadable(file: &Path, error: std::io::Error) -> Failure {
    Failure::new(1, format!("{}: {error}", file.display()))
}

/// The folder with <starverbs/kernel.h>: where this command is installed, or was built.
fn headers() -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    let folder = own.parent()?.parent()?.join("include");
    folder.join("starverbs/kernel.h").exists().then_some(folder)
}

fn build_c(source: &Path, output: &Path) -> Result<(), Failure> {
    let mut clang = Command::new(std::env::var_os("CLANG").unwrap_or_else(|| "clang".into()));
    clang.args(["--target=wasm32", "-std=c11", "-Wall", "-Wextra", "-O2", "-ffreestanding", "-nostdlib"]);
    clang.args(["-Wl,--no-entry", "-Wl,--strip-all", "-Wl,-z,stack-size=65536"]);
    if let Some(headers) = headers() {
        let mut option = OsString::from("-I");
        option.push(headers);
        clang.arg(option);
    }
    clang.arg("-o").arg(output).arg(source);
    run(&mut clang, "Debian's clang and lld").map(drop)
}

fn build_rust(folder: &Path, output: &Path) -> Result<(), Failure> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--release", "--target", "wasm32-unknown-unknown", "--message-format", "json"]);
    /* small, whatever the profile is for: a card takes no megabytes */
    cargo.env("CARGO_PROFILE_RELEASE_LTO", "fat").env("CARGO_PROFILE_RELEASE_STRIP", "symbols");
    cargo.arg("--manifest-path").arg(folder.join("Cargo.toml")).stdout(Stdio::piped());
    let said = run(&mut cargo, "Rust, and `rustup target add wasm32-unknown-unknown`")?;
    let modules = String::from_utf8_lossy(&said).lines().filter_map(module_of).collect::<Vec<_>>();
    let module = modules
        .last()
        .ok_or_else(|| Failure::new(1, format!("{}: no crate of the type cdylib there", folder.display())))?;
    std::fs::copy(module, output).map(drop).map_err(|error| unreadable(output, error))
}

/// The module that a line of cargo's is about.
fn module_of(line: &str) -> Option<PathBuf> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    let files = message.get("filenames")?.as_array()?;
    let module =
        |file: &serde_json::Value| file.as_str().filter(|file| file.ends_with(".wasm")).map(PathBuf::from);
    files.iter().find_map(module)
}

/// Runs a compiler; gives what it printed, if that is caught.
fn run(command: &mut Command, needs: &str) -> Result<Vec<u8>, Failure> {
    let name = command.get_program().to_string_lossy().into_owned();
    let child = command.spawn().and_then(std::process::Child::wait_with_output);
    let done = child.map_err(|error| Failure::new(1, format!("{name}: {error} (this needs {needs})")))?;
    if !done.status.success() {
        return Err(Failure::new(1, format!("{name} failed (this needs {needs})")));
    }
    Ok(done.stdout)
}

fn check(file: &Path) -> Result<(), Failure> {
    let module = std::fs::read(file).map_err(|error| unreadable(file, error))?;
    starverbs_verbs::check_module(&module)
        .map_err(|why| Failure::new(1, format!("{}: no kernel: {why}", file.display())))?;
    println!("{}: a kernel, {} bytes", file.display(), module.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn op_codes_are_numbers_of_both_kinds() {
        assert_eq!((op_code("83"), op_code("0x53"), op_code("any")), (Ok(83), Ok(83), Ok(u64::MAX)));
        assert!(op_code("-1").is_err() && op_code("0x").is_err() && op_code("get").is_err());
    }

    #[test]
    fn the_module_is_named_by_cargo() {
        let line = r#"{"reason":"compiler-artifact","filenames":["/t/libx.rlib","/t/x.wasm"]}"#;
        assert_eq!(module_of(line), Some(PathBuf::from("/t/x.wasm")));
        assert_eq!(module_of(r#"{"reason":"build-finished","success":true}"#), None);
        assert_eq!(module_of("warning: text"), None);
    }
}
