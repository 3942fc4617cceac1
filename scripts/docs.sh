#!/usr/bin/env bash
# Builds the documentation as a site in target/docs/book. The Markdown files keep their relative
# paths, so that links work both in the repository and on the site.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VERSION=0.5.4
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/feedline
OUT=${CARGO_TARGET_DIR:-target}/docs
export PATH=$CACHE/mdbook/bin:$PATH

if ! command -v mdbook >/dev/null 2>&1; then
  echo "docs: installing mdbook $VERSION once, which takes some minutes"
  cargo install --quiet --locked --root "$CACHE/mdbook" --no-default-features --features search "mdbook@$VERSION"
fi

rm -rf "$OUT"
mkdir -p "$OUT/src"
git ls-files -z '*.md' 'docs/pictures/*' 'docs/site/site.css' | xargs -0 cp --parents -t "$OUT/src"
# mdbook writes each README.md as index.html.
find "$OUT/src" -name '*.md' -exec sed -i -E 's/\]\(([^):]*)README\.md/](\1index.md/g' {} +
cp docs/site/SUMMARY.md "$OUT/src/SUMMARY.md"
cp docs/site/book.toml "$OUT/src/book.toml"
rm "$OUT/src/docs/site/SUMMARY.md"
mdbook build "$OUT/src"
echo "docs: open $OUT/book/index.html"
