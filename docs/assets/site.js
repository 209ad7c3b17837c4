// The theme adds these after the page is loaded, without a name for screen readers or a way in for the keyboard.

// Wide tables scroll inside a box.
document$.subscribe(function () {
  document.querySelectorAll(".md-typeset__scrollwrap").forEach(function (box, index) {
    var before = box.previousElementSibling;
    while (before && !/^H[1-6]$/.test(before.tagName)) before = before.previousElementSibling;
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", "Table " + (index + 1) + (before ? ": " + before.firstChild.textContent : ""));
  });
});

// Code blocks get a landmark with a button to copy them.
new MutationObserver(function () {
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach(function (nav) {
    var number = Array.prototype.indexOf.call(document.querySelectorAll(".highlight"), nav.closest(".highlight")) + 1;
    nav.setAttribute("aria-label", "Code block " + number);
  });
}).observe(document.body, { childList: true, subtree: true });
