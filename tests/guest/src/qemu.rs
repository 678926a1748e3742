//! QEMU: which one, and how it runs guests here.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::root;

const OWN: &str = "qemu-system-x86_64";

/// A QEMU that takes a PCI device from a socket (vfio-user), as a program and its first arguments: that of
/// the root folder `root` if one is named, else this host's, or one in a root folder that is made below
/// `cache`.
///
/// # Errors
/// It cannot be had, in words.
pub fn with_vfio_user(cache: &Path, root: Option<&Path>) -> Result<Vec<String>, String> {
    if let Some(root) = root {
        let program = root.join("usr/bin").join(OWN);
        return if program.exists() {
            Ok(of_root(root))
        } else {
            Err(format!("{} is missing", program.display()))
        };
    }
    let devices = Command::new(OWN).args(["-device", "help"]).output();
    if devices.is_ok_and(|said| String::from_utf8_lossy(&said.stdout).contains("vfio-user-pci")) {
        return Ok(vec![OWN.to_owned()]);
    }
    let root = cache.join("qemu");
    root::make(&root, "qemu-system-x86")?;
    Ok(of_root(&root))
}

/// The QEMU of a root folder with its own libraries, so that it needs no chroot and sees the host's files.
fn of_root(root: &Path) -> Vec<String> {
    let file = |name: &str| root.join(name).display().to_string();
    let words =
        [file("lib64/ld-linux-x86-64.so.2"), "--library-path".to_owned(), file("usr/lib/x86_64-linux-gnu")];
    let data = ["-L".to_owned(), file("usr/share/qemu"), "-L".to_owned(), file("usr/share/seabios")];
    words.into_iter().chain([file("usr/bin/qemu-system-x86_64")]).chain(data).collect()
}

/// How guests run: by the CPU's own means where this host's has them, else by plain emulation.
pub fn accelerator() -> Vec<String> {
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let has_means = flags.split_ascii_whitespace().any(|flag| matches!(flag, "vmx" | "svm"));
    let opens = || OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
    let words =
        if has_means && opens() { "-accel kvm -cpu host" } else { "-accel tcg,thread=multi -cpu max" };
    words.split(' ').map(str::to_owned).collect()
}

/// Arguments for a guest of so many MiB whose memory other processes map, with a PCI device for each socket.
pub fn vfio_user_devices(memory: u32, sockets: &[PathBuf]) -> Vec<String> {
    let shared = format!("memory-backend-memfd,id=m,size={memory}M,share=on");
    let mut words = vec!["-object".to_owned(), shared, "-machine".to_owned(), "memory-backend=m".to_owned()];
    for (number, socket) in sockets.iter().enumerate() {
        let path = socket.display();
        words.push("-device".to_owned());
        words.push(format!(
            r#"{{"driver":"vfio-user-pci","id":"star{number}","socket":{{"type":"unix","path":"{path}"}}}}"#
        ));
    }
    words
}
