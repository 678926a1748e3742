//! `starverbs kernel`: builds kernels of StRoM that are WebAssembly modules, and says whether a card takes
//! them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Subcommand;

use crate::Failure;

/// Build and check kernels of your own, as WebAssembly modules (StRoM)
#[derive(clap::Args)]
#[command(after_help = "Programs load them with stardv_load_module(3).")]
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
    fn the_module_is_named_by_cargo() {
        let line = r#"{"reason":"compiler-artifact","filenames":["/t/libx.rlib","/t/x.wasm"]}"#;
        assert_eq!(module_of(line), Some(PathBuf::from("/t/x.wasm")));
        assert_eq!(module_of(r#"{"reason":"build-finished","success":true}"#), None);
        assert_eq!(module_of("warning: text"), None);
    }
}
