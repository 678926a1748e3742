//! The sysfs view on disk: a private folder of real files, shared by the user's processes that see the same
//! view, and gone with the last of them.
//!
//! The folder's name carries the view's fingerprint. Whoever uses it holds a shared lock (flock(2)) on it,
//! which the kernel gives back however a process ends; who can get the lock alone removes the folder. A
//! folder appears under its name only when it is whole, and loses that name before it is taken apart. Owns
//! that protocol; it must not know who reads the files.

use std::ffi::{CString, OsStr};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::counters::LiveNumber;
use crate::sysfs_view::{DEVICE_NODE, Node, SysfsView};

/// What the names of all folders begin with.
pub(crate) const PREFIX: &str = "starverbs-sysfs-";
/// Lock descriptors lie above those that shells and programs name by number.
const LOWEST_LOCK: RawFd = 200;
/// How often others may come between before a place is given up.
const TRIES: u32 = 50;

/// The folder, held by this process.
#[derive(Debug)]
pub(crate) struct Tree {
    /// Where it is
    pub(crate) root: CString,
    /// The process that holds it: forked children must hold it for themselves
    pid: u32,
    /// The user that it was made for: no other may look into it
    user: libc::uid_t,
    lock: RawFd,
    /// Device and inode of the folder, by which the lock's descriptor is known: a program may close any
    id: (u64, u64),
    /// Inode of the file that stands for the device node
    pub(crate) node: u64,
    /// Inodes of the files whose text is read when they are opened, in order
    live: Vec<(u64, LiveNumber)>,
}

impl Tree {
    /// Finds or makes the view's folder in the first place that has room for it.
    ///
    /// # Errors
    /// That of the last place.
    pub(crate) fn hold(view: &SysfsView) -> io::Result<Tree> {
        let mut last = io::Error::from(ErrorKind::NotFound);
        for place in places() {
            match Tree::hold_in(&place, view) {
                Ok(tree) => return Ok(tree),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn hold_in(place: &Path, view: &SysfsView) -> io::Result<Tree> {
        let root = place.join(format!("{}{:016x}", prefix(), view.fingerprint()));
        for attempt in 0..TRIES {
            if let Some(lock) = join(&root)? {
                return Tree::of(root, lock, view);
            }
            if attempt == 0 {
                sweep(place);
            }
            match make(&root, view) {
                Ok(lock) => return Tree::of(root, lock, view),
                // Somebody was faster, or took ours for abandoned.
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists | ErrorKind::NotFound
                    ) =>
                {
                    std::thread::yield_now();
                }
                Err(error) => return Err(error),
            }
        }
        Err(ErrorKind::TimedOut.into())
    }

    fn of(root: PathBuf, lock: OwnedFd, view: &SysfsView) -> io::Result<Tree> {
        let inode = |path: &str| Ok::<u64, io::Error>(fs::symlink_metadata(root.join(path))?.ino());
        let mut live = Vec::new();
        for (path, node) in &view.0 {
            if let Node::Live(counter) = node {
                live.push((inode(path)?, *counter));
            }
        }
        live.sort_unstable_by_key(|(inode, _)| *inode);
        let node = inode(DEVICE_NODE)?;
        let id = identity(lock.as_raw_fd()).ok_or_else(io::Error::last_os_error)?;
        let root = CString::new(root.into_os_string().as_bytes())?;
        Ok(Tree { root, pid: std::process::id(), user: user(), lock: lock.into_raw_fd(), id, node, live })
    }

    /// Whether this process still holds it: a forked child does not, nor a program that closed the
    /// descriptor, nor one that became another user, to which the folder is closed.
    pub(crate) fn is_held(&self) -> bool {
        self.pid == std::process::id() && self.user == user() && self.lock_is_ours()
    }

    fn lock_is_ours(&self) -> bool {
        identity(self.lock) == Some(self.id)
    }

    /// The number of the file system that it is on.
    pub(crate) fn device(&self) -> u64 {
        self.id.0
    }

    /// The counter behind a file, if it is one of those.
    pub(crate) fn live(&self, inode: u64) -> Option<LiveNumber> {
        let at = self.live.binary_search_by_key(&inode, |(i, _)| *i).ok()?;
        self.live.get(at).map(|(_, live)| *live)
    }

    /// Gives up what a parent held, which stays the parent's, or what is another user's, who removes it.
    pub(crate) fn forget(&self) {
        if self.lock_is_ours() {
            // SAFETY: the descriptor is still the lock's. Its number may be reused from here on, but
            // `lock_is_ours` is asked first each time.
            unsafe { libc::close(self.lock) };
        }
    }

    /// Removes the folder unless another process holds it: for the end of the process.
    pub(crate) fn leave(&self) {
        if self.is_held() && lock_alone(self.lock) {
            take_apart(Path::new(OsStr::from_bytes(self.root.to_bytes())));
        }
    }
}

/// Where folders may lie, best first: memory before disks.
fn places() -> Vec<PathBuf> {
    let mut places = vec![PathBuf::from("/dev/shm")];
    for variable in ["XDG_RUNTIME_DIR", "TMPDIR"] {
        places.extend(std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute()));
    }
    places.extend(["/tmp", "/var/tmp"].map(PathBuf::from));
    places
}

/// The user as whom this process looks at files.
fn user() -> libc::uid_t {
    // SAFETY: geteuid has no conditions.
    unsafe { libc::geteuid() }
}

/// What the names of this user's folders begin with.
fn prefix() -> String {
    format!("{PREFIX}{}-", user())
}

/// A name that no other process takes.
fn own_name(root: &Path) -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let mut name = root.as_os_str().to_owned();
    name.push(format!(".{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
    name.into()
}

fn identity(fd: RawFd) -> Option<(u64, u64)> {
    // SAFETY: a stat of zeroes is valid: integers.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: fstat fills the struct, which lives across the call; any number may be asked for.
    (unsafe { libc::fstat(fd, &mut stat) } == 0).then_some((stat.st_dev, stat.st_ino))
}

/// Opens a folder of this user that nobody else can change, for locking.
fn open(path: &Path) -> io::Result<OwnedFd> {
    let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
    let folder = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let found = folder.metadata()?;
    if found.uid() != user() || found.mode() & 0o022 != 0 {
        return Err(ErrorKind::PermissionDenied.into());
    }
    // SAFETY: F_DUPFD_CLOEXEC makes a new descriptor, which is nobody else's.
    let high = unsafe { libc::fcntl(folder.as_raw_fd(), libc::F_DUPFD_CLOEXEC, LOWEST_LOCK) };
    // SAFETY: as above; where so high a number is not allowed, the low one does.
    Ok(if high < 0 { folder.into() } else { unsafe { OwnedFd::from_raw_fd(high) } })
}

fn lock(fd: RawFd, how: libc::c_int) -> bool {
    // SAFETY: flock takes any descriptor.
    unsafe { libc::flock(fd, how | libc::LOCK_NB) == 0 }
}

fn lock_alone(fd: RawFd) -> bool {
    lock(fd, libc::LOCK_EX)
}

/// Joins the users of a folder; None if there is none, or if it goes just now.
fn join(root: &Path) -> io::Result<Option<OwnedFd>> {
    let folder = match open(root) {
        Ok(folder) => folder,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let still = || {
        fs::symlink_metadata(root).is_ok_and(|at| Some((at.dev(), at.ino())) == identity(folder.as_raw_fd()))
    };
    Ok((lock(folder.as_raw_fd(), libc::LOCK_SH) && still()).then_some(folder))
}

/// Makes the folder under a name of its own, locked, and then gives it its name.
fn make(root: &Path, view: &SysfsView) -> io::Result<OwnedFd> {
    let name = own_name(root);
    DirBuilder::new().mode(0o700).create(&name)?;
    let made = || {
        // None: swept away before it was locked.
        let folder = join(&name)?.ok_or(ErrorKind::NotFound)?;
        fill(&name, view)?;
        fs::rename(&name, root)?;
        Ok(folder)
    };
    made().inspect_err(|_| drop(fs::remove_dir_all(&name)))
}

fn fill(folder: &Path, view: &SysfsView) -> io::Result<()> {
    for (path, node) in &view.0 {
        let path = folder.join(path);
        if let Some(parent) = path.parent().filter(|parent| !parent.exists()) {
            fs::create_dir_all(parent)?;
        }
        match node {
            Node::Link(target) => symlink(target, &path)?,
            Node::Text(text) => write(&path, text, 0o444)?,
            // Seen only where this library is not, for instance by a program that was linked statically.
            Node::Live(_) => write(&path, "0\n", 0o444)?,
            Node::Device => write(&path, "", 0o666)?,
        }
    }
    Ok(())
}

fn write(path: &Path, text: &str, mode: u32) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    file.write_all(text.as_bytes())?;
    file.set_permissions(Permissions::from_mode(mode))
}

/// Removes a folder that is locked for this process alone. Without its name first: who dies in between leaves
/// nothing that looks whole.
fn take_apart(root: &Path) {
    let name = own_name(root);
    if fs::rename(root, &name).is_ok() {
        let _ = fs::remove_dir_all(&name);
    }
}

/// Removes what killed processes of this user left in a place.
fn sweep(place: &Path) {
    let prefix = prefix();
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(&prefix)
            && let Ok(folder) = open(&entry.path())
            && lock_alone(folder.as_raw_fd())
        {
            take_apart(&entry.path());
        }
    }
}

#[cfg(test)]
#[path = "tree_tests.rs"]
mod tests;
