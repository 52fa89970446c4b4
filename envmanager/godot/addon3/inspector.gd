tool
extends EditorInspectorPlugin
# Shows what is missing above the fields of agents and arenas, and hides the fields that count for nothing.
#
# The engine asks only scripts with `tool` for warnings, and the scripts of games have none.

const Checks = preload("res://addons/envmanager/checks.gd")


func can_handle(object: Object) -> bool:
	return object is Node and Checks.is_a(object, Checks.AGENT)


func parse_begin(object: Object) -> void:
	for sentence in Checks.warnings_of(object):
		_say(sentence, Color.gold)
	if not Checks.uses_sizes(object):
		_say("The agents of this scene have sizes of their own, so those of the arena are hidden.", Color.gray)


func parse_property(object: Object, _type: int, name: String, _hint: int, _text: String, _usage: int) -> bool:
	return name in Checks.SIZES and not Checks.uses_sizes(object)


func _say(sentence: String, color: Color) -> void:
	var label = Label.new()
	label.text = sentence
	label.autowrap = true
	label.modulate = color
	add_custom_control(label)
