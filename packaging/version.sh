#!/usr/bin/env bash
# version.sh VERSION: raises the version of all packages, and closes the changelog's section of what
# is unreleased under VERSION and today's date. Changes files only; prints what is done next.
# docs/reference/versions.md has the policy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { echo "version.sh: $*" >&2; exit 1; }

[[ ${1:-} =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || fail "usage: version.sh MAJOR.MINOR.PATCH"
new=$1
old=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
[[ -n $old ]] || fail "Cargo.toml has no version of the workspace"
[[ $new != "$old" && $(printf '%s\n' "$old" "$new" | sort -V | tail -1) == "$new" ]] || fail "$new is not above $old"
grep -q '^## Unreleased$' CHANGELOG.md || fail "CHANGELOG.md has no section 'Unreleased'"
awk '/^## /{on = $2 == "Unreleased"} on && /^- /{n++} END{exit !n}' CHANGELOG.md || fail "nothing is unreleased by CHANGELOG.md"

sed -i -e "/^\[workspace.package\]/,/^\[/s/^version = \"$old\"/version = \"$new\"/" \
    -e "s/^\(netmem[a-z-]* = {.*version = \)\"$old\"/\1\"$new\"/" Cargo.toml
sed -i "s/^## Unreleased$/## Unreleased\n\n## $new - $(date +%Y-%m-%d)/" CHANGELOG.md
cargo metadata --offline --format-version 1 > /dev/null # writes Cargo.lock
echo "$old -> $new. Next: read the changelog, commit, CI, git tag v$new, cargo publish --workspace"
