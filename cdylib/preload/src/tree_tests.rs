//! Folders of the sysfs view, in a place of the test's own.

use super::*;
use crate::counters;

/// A place that goes with the test.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Place {
        let path = std::env::temp_dir().join(format!("starverbs-test-{name}-{}", std::process::id()));
        fs::create_dir(&path).expect("a folder for the test");
        Place(path)
    }

    fn entries(&self) -> usize {
        fs::read_dir(&self.0).map_or(0, Iterator::count)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn view(text: &str) -> SysfsView {
    let live = counters::card().next().map(|(_, live)| Node::Live(live)).expect("a counter");
    SysfsView(vec![
        ("sys/a/b/text".to_owned(), Node::Text(text.to_owned())),
        ("sys/link".to_owned(), Node::Link("a/b".to_owned())),
        ("sys/a/live".to_owned(), live),
        (DEVICE_NODE.to_owned(), Node::Device),
    ])
}

fn path(tree: &Tree) -> &Path {
    Path::new(OsStr::from_bytes(tree.root.to_bytes()))
}

#[test]
fn users_share_one_folder_and_the_last_removes_it() {
    let place = Place::new("share");
    let one = Tree::hold_in(&place.0, &view("x\n")).expect("a tree");
    let two = Tree::hold_in(&place.0, &view("x\n")).expect("the same tree");
    assert_eq!((one.root.clone(), one.id, place.entries()), (two.root.clone(), two.id, 1));
    assert_eq!(fs::read_to_string(path(&one).join("sys/link/text")).ok().as_deref(), Some("x\n"));
    assert!(one.live(one.node).is_none());
    let inode = fs::metadata(path(&one).join("sys/a/live")).map(|file| file.ino()).unwrap_or(0);
    assert!(one.live(inode).is_some());
    one.leave();
    assert_eq!(place.entries(), 1, "the other one holds it");
    one.forget();
    assert!(!one.is_held() && two.is_held());
    two.leave();
    assert_eq!(place.entries(), 0);
}

#[test]
fn another_view_has_another_folder_and_the_abandoned_one_goes() {
    let place = Place::new("sweep");
    let killed = Tree::hold_in(&place.0, &view("x\n")).expect("a tree");
    let busy = Tree::hold_in(&place.0, &view("y\n")).expect("a tree");
    assert_eq!(place.entries(), 2);
    // What the kernel does at the end of a process.
    killed.forget();
    fs::create_dir(place.0.join("other")).expect("a folder that is not ours");
    let third = Tree::hold_in(&place.0, &view("z\n")).expect("a tree");
    assert_eq!(place.entries(), 3);
    assert!(!path(&killed).exists() && path(&busy).exists() && path(&third).exists());
}

#[test]
fn a_folder_of_which_others_may_change_the_files_is_refused() {
    let place = Place::new("refuse");
    let own = Tree::hold_in(&place.0, &view("x\n")).expect("a tree");
    fs::set_permissions(path(&own), Permissions::from_mode(0o777)).expect("permissions");
    let refused = Tree::hold_in(&place.0, &view("x\n")).map_err(|error| error.kind());
    assert_eq!(refused.err(), Some(ErrorKind::PermissionDenied));
}

#[test]
fn a_lock_whose_descriptor_the_program_reused_is_no_lock() {
    let place = Place::new("reuse");
    let tree = Tree::hold_in(&place.0, &view("x\n")).expect("a tree");
    let null = File::open("/dev/null").expect("/dev/null");
    // SAFETY: what a program does that names descriptors by number.
    unsafe { libc::dup2(null.as_raw_fd(), tree.lock) };
    assert!(!tree.is_held());
    tree.leave();
    assert_eq!(place.entries(), 1, "nobody's lock, nobody's to remove");
    // SAFETY: made above.
    unsafe { libc::close(tree.lock) };
}

#[test]
fn threads_that_come_and_go_together_find_a_whole_folder() {
    let place = Place::new("race");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..20 {
                    let tree = Tree::hold_in(&place.0, &view("x\n")).expect("a tree");
                    let text = fs::read_to_string(path(&tree).join("sys/a/b/text"));
                    assert_eq!(text.ok().as_deref(), Some("x\n"));
                    tree.leave();
                    tree.forget();
                }
            });
        }
    });
    assert_eq!(place.entries(), 0);
}
