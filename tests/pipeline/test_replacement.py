"""A replaced attribute is restored as it was: static, inherited or plain."""

from threefold.pipeline import replacement
from threefold.pipeline.replacement import replaced


class Parent:
    @staticmethod
    def static() -> str:
        return "static"

    def inherited(self) -> str:
        return "inherited"


class Child(Parent):
    pass


def test_attributes_are_restored() -> None:
    before = vars(Parent)["static"]
    with (
        replaced(Parent, "static", staticmethod(lambda: "other")),
        replaced(Child, "inherited", lambda self: "other"),
        replaced(replacement, "__doc__", None),
    ):
        assert Parent.static() == Child().static() == Child().inherited() == "other"
        assert Parent().inherited() == "inherited" and replacement.__doc__ is None
    assert vars(Parent)["static"] is before and Child().static() == "static"
    assert "inherited" not in vars(Child) and Child().inherited() == "inherited"
    assert replacement.__doc__ is not None
