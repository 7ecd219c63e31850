//! The Debian packages of the library: what is in them, and programs that are built from them,
//! unpacked and not installed. Proves CAPI-7.

use crate::build::{crate_folder, run};
use netmem_testing::tree::TREE;
use netmem_testing::{installed, skip};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

fn text(command: &mut Command) -> String {
    run(command).trim().to_owned()
}

/// The folder in which the library was built with this test.
fn built() -> PathBuf {
    std::env::current_exe().expect("the test's path").parent().expect("a folder").to_owned()
}

/// Makes the packages of a library, and returns those two files: what programs need when they run,
/// and what is needed to build them.
fn packages(built: &Path, to: &Path) -> [PathBuf; 2] {
    let mut script = Command::new(Path::new(TREE).join("packaging/debian-library.sh"));
    script.arg(built).arg(to).env_remove("SOURCE_DATE_EPOCH");
    // Packed for this test only.
    run(script.env("CARGO_NET_OFFLINE", "true").env("DPKG_DEB_COMPRESSOR_TYPE", "none"));
    ["libnetmem0", "libnetmem-dev"].map(|package| {
        let files = std::fs::read_dir(to).expect("a folder").map(|entry| entry.expect("an entry").path());
        let name = format!("{package}_{}-1_", env!("CARGO_PKG_VERSION"));
        let mut files =
            files.filter(|path| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&name)));
        let file = files.next().unwrap_or_else(|| panic!("no {name} in {}", to.display()));
        assert!(files.next().is_none() && file.extension().is_some_and(|end| end == "deb"));
        file
    })
}

fn field(package: &Path, name: &str) -> String {
    text(Command::new("dpkg-deb").arg("--field").arg(package).arg(name))
}

/// The fields by which the package manager keeps the two together, and the link to the library's
/// SONAME in the folder of its architecture.
fn contents([library, development]: &[PathBuf; 2], libdir: &str) {
    let version = format!("{}-1", env!("CARGO_PKG_VERSION"));
    assert!(field(library, "Depends").contains("libc6 (>= "), "{}", field(library, "Depends"));
    assert_eq!(field(development, "Depends"), format!("libnetmem0 (= {version})"));
    assert_eq!([field(library, "Multi-Arch"), field(development, "Multi-Arch")], ["same", "same"]);
    let listed = |package: &Path| {
        let listing = text(Command::new("dpkg-deb").arg("--contents").arg(package));
        listing.lines().map(|line| line.split_whitespace().skip(5).collect::<Vec<_>>().join(" ")).collect::<Vec<_>>()
    };
    let architecture = field(library, "Architecture");
    let (library, development) = (listed(library), listed(development));
    let has = |files: &[String], file: String| assert!(files.contains(&file), "{file} is not in {files:#?}");
    let of = env!("CARGO_PKG_VERSION");
    has(&library, format!("./usr/{libdir}/libnetmem.so.{of}"));
    has(&library, format!("./usr/{libdir}/libnetmem.so.0 -> libnetmem.so.{of}"));
    has(&library, format!("./usr/share/doc/libnetmem0/libraries.{architecture}.gz"));
    has(&development, format!("./usr/{libdir}/libnetmem.so -> libnetmem.so.0"));
    for file in ["libnetmem.a", "pkgconfig/netmem.pc"] {
        has(&development, format!("./usr/{libdir}/{file}"));
    }
    for file in ["include/netmem.h", "include/netmem.hpp", "share/doc/libnetmem-dev/examples/hand_over.c"] {
        has(&development, format!("./usr/{file}"));
    }
    for (package, files) in [("libnetmem0", &library), ("libnetmem-dev", &development)] {
        for file in ["copyright", "changelog.gz", "changelog.Debian.gz"] {
            has(files, format!("./usr/share/doc/{package}/{file}"));
        }
    }
    // No file is in both.
    let both = library.iter().find(|file| !file.ends_with('/') && development.contains(file));
    assert_eq!(both, None);
}

fn unpack(packages: &[PathBuf; 2], root: &Path) {
    for package in packages {
        run(Command::new("dpkg-deb").arg("--extract").arg(package).arg(root));
    }
}

/// The documents do not depend on when the library was built: packages of several architectures,
/// which are installed together, have the same files.
fn same_documents_of_another_build(folder: &Path, root: &Path) {
    let again = folder.join("again");
    std::fs::create_dir(&again).expect("a folder");
    let (archive, library) = ("libnetmem_capi.a", again.join("libnetmem_capi.so"));
    std::os::unix::fs::symlink(built().join(archive), again.join(archive)).expect("a link");
    std::fs::copy(built().join("libnetmem_capi.so"), &library).expect("a copy");
    let copied = std::fs::File::options().write(true).open(&library).expect("the copy");
    copied.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000)).expect("a date");
    let other = folder.join("other");
    unpack(&packages(&again, &folder.join("packages-again")), &other);
    let documents = "usr/share/doc";
    run(Command::new("diff").arg("-r").arg(root.join(documents)).arg(other.join(documents)));
}

/// Paths are relative to the folder in which the caller is.
#[test]
fn the_library_is_installed_where_the_caller_says() {
    if let Err(why) = installed(&["cargo"]) {
        return skip(&why);
    }
    let folder = tempfile::tempdir().expect("a folder");
    let at = |path: &str| folder.path().join(path);
    std::os::unix::fs::symlink(built(), at("built")).expect("a link");
    let mut install = Command::new(crate_folder().join("install.sh"));
    install.current_dir(&folder).args(["/usr", "lib/here"]).env("CARGO_NET_OFFLINE", "true");
    run(install.env("BUILT", "built").env("DESTDIR", "root"));
    for file in ["lib/here/libnetmem.so.0", "lib/here/libnetmem.a", "lib/here/pkgconfig/netmem.pc", "include/netmem.h"]
    {
        assert!(at("root/usr").join(file).exists(), "{file}");
    }
}

#[test]
fn programs_are_built_from_the_debian_packages() {
    let tools = installed(&[
        "awk",
        "cargo",
        "diff",
        "dpkg-architecture",
        "dpkg-deb",
        "dpkg-shlibdeps",
        "gcc",
        "jq",
        "objdump",
        "pkg-config",
        "strip",
    ]);
    if let Err(why) = tools {
        return skip(&why);
    }
    let folder = tempfile::tempdir().expect("a folder");
    let libdir = format!("lib/{}", text(Command::new("dpkg-architecture").args(["-q", "DEB_HOST_MULTIARCH"])));
    let packed = packages(&built(), &folder.path().join("packages"));
    contents(&packed, &libdir);
    let root = folder.path().join("root");
    unpack(&packed, &root);
    same_documents_of_another_build(folder.path(), &root);
    let at = root.join("usr").join(&libdir);
    let flags = |options: &[&str]| {
        let mut command = Command::new("pkg-config");
        command.env("PKG_CONFIG_LIBDIR", at.join("pkgconfig")).env("PKG_CONFIG_SYSROOT_DIR", &root);
        // In a root of their own they are no folders of the system.
        command.envs([("PKG_CONFIG_ALLOW_SYSTEM_CFLAGS", "1"), ("PKG_CONFIG_ALLOW_SYSTEM_LIBS", "1")]);
        text(command.args(options).arg("netmem")).split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(flags(&["--modversion"]), [env!("CARGO_PKG_VERSION")]);
    let source = crate_folder().join("c/hand_over.c");
    let build = |name: &str, last: Vec<String>| {
        let program = folder.path().join(name);
        let mut gcc = Command::new("gcc");
        gcc.arg("-std=c11").args(flags(&["--cflags"])).arg(&source).arg("-o").arg(&program).args(last).arg("-pthread");
        run(&mut gcc);
        Command::new(program)
    };
    let expected = "packets 100000: allocated 100000, returned 100000, in flight 0\n";
    let shared = run(build("shared", flags(&["--libs"])).env("LD_LIBRARY_PATH", &at));
    let archive = [vec![at.join("libnetmem.a").display().to_string()], flags(&["--static", "--libs-only-l"])].concat();
    // The archive, and what it needs, without the shared library.
    let archive = archive.into_iter().filter(|flag| flag != "-lnetmem").collect();
    let linked_in = run(&mut build("archive", archive));
    assert_eq!([shared.as_str(), linked_in.as_str()], [expected, expected]);
}
