//! Debian's own kernel, unpacked and not installed, with an initramfs that finds the host's files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use starverbs_conformance::command::output;

/// What QEMU boots.
pub struct Kernel {
    /// The compressed kernel.
    pub image: PathBuf,
    /// Modules, busybox and init.sh.
    pub initramfs: PathBuf,
    /// The name of the package, with its version.
    pub package: String,
}

/// The modules of every guest; what they depend on is read from themselves.
const BASE: [&str; 5] = ["virtio_pci", "virtio_net", "9pnet_virtio", "9p", "overlay"];
/// How files of modules end, but for what they are packed with.
const SUFFIX: &str = ".ko";
const BUSYBOX: &str = "/bin/busybox";
const INIT: &str = include_str!("../init.sh");

impl Kernel {
    /// Downloads and unpacks the current kernel into the folder `cache`, unless it is there, and makes an
    /// initramfs with `modules` and all that they need.
    ///
    /// # Errors
    /// What cannot be had, in words.
    pub fn prepare(cache: &Path, modules: &[&str]) -> Result<Kernel, String> {
        let package = current_package()?;
        let unpacked = cache.join(&package);
        if !unpacked.exists() {
            unpack(&package, &unpacked)?;
        }
        Kernel::found(&unpacked, cache, modules)
    }

    /// The same with the kernel that is installed in the root folder `root`; `cache` takes the initramfs.
    ///
    /// # Errors
    /// It has none, or not all of the modules.
    pub fn of_root(root: &Path, cache: &Path, modules: &[&str]) -> Result<Kernel, String> {
        let folder = cache.join("newest");
        std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        Kernel::found(root, &folder, modules)
    }

    /// The kernel below `root`, with an initramfs in `folder`.
    fn found(root: &Path, folder: &Path, modules: &[&str]) -> Result<Kernel, String> {
        let image = first_file(&root.join("boot"), "vmlinuz-")?;
        let name = image.file_name().unwrap_or_default().to_string_lossy();
        let package = name.replace("vmlinuz-", "linux-image-");
        let known = Modules::of(root)?;
        let wanted = [&BASE[..], modules].concat();
        let initramfs = folder.join("initramfs.cpio");
        write_initramfs(&known.with_dependencies(&wanted)?, &folder.join("initramfs"), &initramfs)?;
        Ok(Kernel { image, initramfs, package })
    }

    /// What `uname -r` says in it.
    pub fn release(&self) -> &str {
        self.package.trim_start_matches("linux-image-")
    }
}

/// The package with the kernel that linux-image-amd64 stands for today.
fn current_package() -> Result<String, String> {
    let text = output(Command::new("apt-cache").args(["depends", "linux-image-amd64"]))?;
    let name = text.lines().find_map(|line| line.trim().strip_prefix("Depends: "));
    name.map(str::to_owned)
        .ok_or_else(|| "apt-cache knows no linux-image-amd64 (apt-get update first)".to_owned())
}

/// Downloads `package` and unpacks it into `folder`, which appears only when it is complete.
fn unpack(package: &str, folder: &Path) -> Result<(), String> {
    println!("guest: downloading {package}");
    let fresh = folder.with_extension("new");
    let _ = std::fs::remove_dir_all(&fresh);
    std::fs::create_dir_all(&fresh).map_err(|e| format!("{}: {e}", fresh.display()))?;
    output(Command::new("apt-get").args(["download", "-qq", package]).current_dir(&fresh))?;
    let archive = first_file(&fresh, "linux-image")?;
    output(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(&fresh))?;
    let _ = std::fs::remove_file(archive);
    std::fs::rename(&fresh, folder).map_err(|e| format!("{}: {e}", folder.display()))
}

/// The modules of an unpacked kernel.
struct Modules {
    /// File of each module, by its name with `_` for `-`.
    files: BTreeMap<String, PathBuf>,
    /// Names of those that the kernel has built in.
    builtin: BTreeSet<String>,
}

impl Modules {
    fn of(unpacked: &Path) -> Result<Modules, String> {
        let folder = first_file(&unpacked.join("lib/modules"), "")?;
        let list = folder.join("modules.builtin");
        let text = std::fs::read_to_string(&list).map_err(|e| format!("{}: {e}", list.display()))?;
        let builtin = text.lines().map(|line| module_name(Path::new(line))).collect();
        let mut files = BTreeMap::new();
        collect(&folder.join("kernel"), &mut files)?;
        Ok(Modules { files, builtin })
    }

    /// The files of `wanted` and all they depend on, in the order in which they can be loaded.
    fn with_dependencies(&self, wanted: &[&str]) -> Result<Vec<&Path>, String> {
        let mut order = Vec::new();
        for name in wanted {
            self.visit(name, &mut order)?;
        }
        Ok(order)
    }

    fn visit<'a>(&'a self, name: &str, order: &mut Vec<&'a Path>) -> Result<(), String> {
        if self.builtin.contains(name) {
            return Ok(());
        }
        let file = self.files.get(name).ok_or_else(|| format!("the kernel package has no module {name}"))?;
        if order.contains(&file.as_path()) {
            return Ok(());
        }
        for dependency in dependencies(&contents(file)?) {
            self.visit(&dependency.replace('-', "_"), order)?;
        }
        order.push(file);
        Ok(())
    }
}

fn collect(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<(), String> {
    let entries = std::fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.file_name().is_some_and(|name| name.to_string_lossy().contains(SUFFIX)) {
            files.insert(module_name(&path), path);
        }
    }
    Ok(())
}

fn module_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.split(SUFFIX).next().unwrap_or_default().replace('-', "_")
}

/// What a module's file holds, which may be packed.
fn contents(file: &Path) -> Result<Vec<u8>, String> {
    let failed = |reason: String| format!("{}: {reason}", file.display());
    if file.extension().is_none_or(|extension| extension != "xz") {
        return std::fs::read(file).map_err(|e| failed(e.to_string()));
    }
    let output = Command::new("xz").arg("-dc").arg(file).output().map_err(|e| failed(e.to_string()))?;
    if output.status.success() { Ok(output.stdout) } else { Err(failed("xz does not unpack it".to_owned())) }
}

/// What a module says of its dependencies: a string `depends=a,b` among those, each ended by a zero, that
/// describe it.
fn dependencies(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let rest = &module[at + KEY.len()..];
    let list = String::from_utf8_lossy(rest.split(|byte| *byte == 0).next().unwrap_or_default());
    list.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// Packs init.sh, busybox and `modules` with a list of their order.
fn write_initramfs(modules: &[&Path], tree: &Path, to: &Path) -> Result<(), String> {
    let _ = std::fs::remove_dir_all(tree);
    for folder in ["bin", "dev", "proc", "sys", "mod", "lower", "upper", "new"] {
        let folder = tree.join(folder);
        std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    }
    let copy = |from: &Path, into: &str| {
        std::fs::copy(from, tree.join(into)).map(drop).map_err(|e| format!("{}: {e}", from.display()))
    };
    let write =
        |name: &str, bytes: &[u8]| std::fs::write(tree.join(name), bytes).map_err(|e| format!("{name}: {e}"));
    copy(Path::new(BUSYBOX), "bin/busybox")?;
    let mut order = String::new();
    for module in modules {
        let name = format!("{}{SUFFIX}", module_name(module));
        write(&format!("mod/{name}"), &contents(module)?)?;
        order += &format!("{name}\n");
    }
    write("mod/order", order.as_bytes())?;
    write("init", INIT.as_bytes())?;
    let pack = format!("chmod 755 init && find . | {BUSYBOX} cpio -o -H newc >\"$1\"");
    output(Command::new("sh").args(["-c", &pack, "sh"]).arg(to).current_dir(tree)).map(drop)
}

/// The first entry of `folder` whose name begins with `prefix`.
fn first_file(folder: &Path, prefix: &str) -> Result<PathBuf, String> {
    let entries = std::fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let found = entries.flatten().find(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
    found.map(|entry| entry.path()).ok_or_else(|| format!("nothing named {prefix}* in {}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::dependencies;

    #[test]
    fn dependencies_stand_in_the_module() {
        assert_eq!(
            dependencies(b"x\0license=GPL\0depends=ib_core,udp-tunnel\0intree=Y\0"),
            ["ib_core", "udp-tunnel"]
        );
        assert!(dependencies(b"x\0depends=\0y").is_empty());
        assert!(dependencies(b"depend").is_empty());
    }
}
