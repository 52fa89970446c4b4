@tool
extends EditorInspectorPlugin
## Shows what is missing above the fields of agents and arenas, and hides the fields that count for nothing.
##
## The engine asks only scripts with @tool for warnings, and the scripts of games have none.

const Checks := preload("res://addons/envmanager/checks.gd")


func _can_handle(object: Object) -> bool:
	return object is Node and Checks.is_a(object, Checks.AGENT)


func _parse_begin(object: Object) -> void:
	for sentence in Checks.warnings_of(object):
		_say(sentence, Color.GOLD)
	if not Checks.uses_sizes(object):
		_say("The agents of this scene have sizes of their own, so those of the arena are hidden.", Color.GRAY)


func _parse_property(
	object: Object, _type: Variant.Type, name: String, _hint: PropertyHint, _text: String, _usage: int, _wide: bool
) -> bool:
	return name in Checks.SIZES and not Checks.uses_sizes(object)


func _say(sentence: String, color: Color) -> void:
	var label := Label.new()
	label.text = sentence
	label.autowrap_mode = TextServer.AUTOWRAP_WORD_SMART
	label.modulate = color
	add_custom_control(label)
